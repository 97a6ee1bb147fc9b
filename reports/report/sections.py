"""The commands whose results `farsight report` shows, a section each, in the page's order."""

from farsight.reports.sections.benchmarks import HARNESS
from farsight.reports.sections.cost import GENERATE
from farsight.reports.sections.needles import NEEDLE
from farsight.reports.sections.perplexity import PERPLEXITY
from farsight.reports.tool_section import ToolSection

SECTIONS: tuple[ToolSection, ...] = (PERPLEXITY, NEEDLE, GENERATE, HARNESS)
