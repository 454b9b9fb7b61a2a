"""fastai: tabular_learner, fit_one_cycle."""

import numpy as np
import pandas as pd
from fastai.tabular.all import (
    Categorify,
    CategoryBlock,
    FillMissing,
    Normalize,
    TabularDataLoaders,
    accuracy,
    set_seed,
    tabular_learner,
)

set_seed(0)
generator = np.random.default_rng(0)
frame = pd.DataFrame(generator.normal(size=(800, 6)), columns=list("abcdef"))
frame["kind"] = generator.choice(["x", "y", "z"], 800)
frame["target"] = np.where(frame.a + (frame.kind == "x") > 0.3, "yes", "no")
loaders = TabularDataLoaders.from_df(
    frame,
    procs=[Categorify, FillMissing, Normalize],
    cat_names=["kind"],
    cont_names=list("abcdef"),
    y_names="target",
    y_block=CategoryBlock(),
    valid_idx=list(range(600, 800)),
    bs=64,
    num_workers=0,
)
learner = tabular_learner(loaders, layers=[400, 200], metrics=accuracy)
with learner.no_bar(), learner.no_logging():
    learner.fit_one_cycle(3, 1e-2)
print([round(float(value), 4) for value in learner.validate()])
