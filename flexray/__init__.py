"""FlexRay: elastic LLM training on Ray, with a new sequence-parallel plan for every step."""

__version__ = "0.1.0"
