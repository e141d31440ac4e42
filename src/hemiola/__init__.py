"""Data-parallel PyTorch training whose order, period and pace measure and adapt."""

__version__ = "0.1.0"
