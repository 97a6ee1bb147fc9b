"""The tiny `transformers` model of each family; `benchmarks/families` has them for its table."""

from farsight.benchmarks.families.models import FAMILIES as FAMILIES
from farsight.benchmarks.families.models import LENGTH as LENGTH
from farsight.benchmarks.families.models import VISION as VISION
from farsight.benchmarks.families.models import VOCABULARY as VOCABULARY
from farsight.benchmarks.families.models import hf_model as hf_model
from farsight.benchmarks.families.models import hf_vision_model as hf_vision_model
from farsight.benchmarks.families.models import randomise as randomise
from farsight.benchmarks.families.models import tokens as tokens
from farsight.benchmarks.families.models import write_hf as write_hf
