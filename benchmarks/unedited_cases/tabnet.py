"""pytorch-tabnet: TabNetClassifier, fit."""

from pytorch_tabnet.tab_model import TabNetClassifier
from sklearn.datasets import load_digits

x, y = load_digits(return_X_y=True)
x = x.astype("float32") / 16
model = TabNetClassifier(seed=0, verbose=0, device_name="cpu", optimizer_params={"lr": 2e-2})
model.fit(
    x[:1024], y[:1024], eval_set=[(x[1024:], y[1024:])], max_epochs=3, batch_size=256,
    virtual_batch_size=128, drop_last=False, patience=1000,
)  # fmt: skip
print([round(float(v), 4) for v in model.history["loss"]])
