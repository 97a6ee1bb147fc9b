"""The error that a request ends with, in the form that OpenAI's clients read."""

import sys
import traceback
from typing import Any

from farsight.cli import explain
from farsight.errors import UserError


class RequestError(UserError):
    """A request that is not answered.

    Args:
        message: what is wrong, and what to send instead.
        status: of HTTP.
        code: OpenAI's name for the kind of error, where it has one.
        parameter: the field of the request.
    """

    def __init__(self, message: str, status: int = 400, code: str | None = None, parameter: str | None = None) -> None:
        super().__init__(message)
        self.status, self.code, self.parameter = status, code, parameter

    @property
    def body(self) -> dict[str, Any]:
        """The JSON of the answer."""
        kind = "invalid_request_error" if self.status < 500 and self.status != 429 else "server_error"
        kind = "rate_limit_error" if self.status == 429 else kind
        return {"error": {"message": str(self), "type": kind, "param": self.parameter, "code": self.code}}


def reported(error: Exception) -> str:
    """The sentence for whoever asked, printed for whoever runs the server too; a fault in Farsight with its traceback."""
    sentence = explain(error)
    if sentence is None:
        traceback.print_exception(error)
        sentence = f"unexpected {type(error).__name__}: a fault in Farsight; the server's output has the traceback"
    print(f"farsight serve: {sentence}", file=sys.stderr, flush=True)
    return sentence
