"""devmap: plan, check and run Hugging Face device maps."""

__version__ = "0.1.0"
