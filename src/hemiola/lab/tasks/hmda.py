"""Mortgage applications in New Jersey in 2017 (HMDA): was the loan originated (1) or the application denied (0)?

Kept: the 204,748 applications with `action_taken` 1 or 3. The columns of `CATEGORIES` become one input per value, those
of `AMOUNTS` the logarithm of 1 + value, those of `NUMBERS` are taken as they are; amounts and numbers are then
standardised by the training part. Left out: what is the same everywhere (year, state, edit status), what is known only
after the decision (`purchaser_type`, denial reasons), the census tract, and the protected attributes. Every fifth
application, in an order shuffled once for all, is for testing.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from hemiola.errors import InputError
from hemiola.lab.tasks.files import require
from hemiola.lab.tasks.readers import read_zipped_columns, reading
from hemiola.lab.tasks.task import Task, first, logistic_task
from hemiola.streams import stream

CATEGORIES = (
    "agency_code",
    "loan_type",
    "property_type",
    "loan_purpose",
    "owner_occupancy",
    "preapproval",
    "msamd",
    "county_code",
    "has_co_applicant",
)
AMOUNTS = ("loan_amount_000s", "applicant_income_000s")
NUMBERS = (
    "population",
    "minority_population",
    "hud_median_family_income",
    "tract_to_msamd_income",
    "number_of_owner_occupied_units",
    "number_of_1_to_4_family_units",
)
ORIGINATED, DENIED = "1", "3"


@cache
def _applications(root: Path) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    features_path, target_path = root / "hmda/2017-NJ-features.zip", root / "hmda/2017-NJ-target.zip"
    columns = read_zipped_columns(features_path, CATEGORIES + AMOUNTS + NUMBERS)
    action = np.array(read_zipped_columns(target_path, ("action_taken",))["action_taken"])
    count = len(columns[CATEGORIES[0]])
    if len(action) != count:
        raise InputError(f"cannot read {target_path}: {len(action)} rows for {count} applications")
    kept = np.flatnonzero((action == ORIGINATED) | (action == DENIED))
    if len(kept) < 5:
        raise InputError(f"cannot read {target_path}: {len(kept)} applications were originated or denied, too few")
    kept = stream("hmda split").permutation(kept)
    is_test = np.arange(len(kept)) % 5 == 0
    with reading(features_path):
        measures = {name: np.array([float(columns[name][i]) for i in kept]) for name in AMOUNTS + NUMBERS}
    for name in AMOUNTS:
        measures[name] = np.log1p(measures[name])
    inputs = [_standardised(values, ~is_test) for values in measures.values()]
    for name in CATEGORIES:
        cells = [columns[name][i] for i in kept]
        place = {value: number for number, value in enumerate(sorted(set(cells)))}
        inputs += list(np.eye(len(place))[:, [place[cell] for cell in cells]])
    matrix = torch.from_numpy(np.stack(inputs, axis=1).astype(np.float32))
    targets = torch.from_numpy((action[kept] == ORIGINATED).astype(np.int64))
    train = torch.from_numpy(~is_test)
    return (matrix[train], targets[train]), (matrix[~train], targets[~train])


def _standardised(values: np.ndarray, seen: np.ndarray) -> np.ndarray:
    mean, deviation = values[seen].mean(), max(values[seen].std(), 1e-8)
    return np.asarray((values - mean) / deviation)


def logistic(*, l2: float = 1e-4, examples: int = 0, data: Path | None = None) -> Task:
    """Logistic regression on HMDA; convex while l2 > 0.

    ``examples``: use only the first so many training applications; 0 for all.
    """
    train, test = _applications(require("hmda", data))
    features = train[0].shape[1]
    return logistic_task("hmda-logistic", first(train, examples), test, features, l2, lr=0.05, batch=16)
