"""Period: how many local steps between two averagings."""

from hemiola.period.clocked import Clocked
from hemiola.period.fda import FDA
from hemiola.period.measuring import Adaptive, Budget
from hemiola.period.schedules import QSR, Constant, Decreasing, Full, PostLocal

PERIODS: dict[str, type] = {
    "full": Full,
    "constant": Constant,
    "adaptive": Adaptive,
    "decreasing": Decreasing,
    "post-local": PostLocal,
    "qsr": QSR,
    "budget": Budget,
    "clocked": Clocked,
    "fda": FDA,
}

__all__ = ["FDA", "PERIODS", "QSR", "Adaptive", "Budget", "Clocked", "Constant", "Decreasing", "Full", "PostLocal"]
