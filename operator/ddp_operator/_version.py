"""The version of the distribution, which `make generate` copies to the chart, the samples and the images."""

__version__ = "0.2.0"
