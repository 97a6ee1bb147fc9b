"""The dtypes that `--dtype` offers for written weights; torch has them under the same names."""

DTYPES = ("float32", "bfloat16", "float16")
