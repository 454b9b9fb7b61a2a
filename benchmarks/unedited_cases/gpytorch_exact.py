"""gpytorch: exact GP regression."""

import gpytorch
import torch

torch.manual_seed(0)
x = torch.linspace(0, 1, 60)
y = torch.sin(6 * x) + 0.1 * torch.randn(60)


class GP(gpytorch.models.ExactGP):
    def __init__(self, x, y, likelihood):
        super().__init__(x, y, likelihood)
        self.mean = gpytorch.means.ConstantMean()
        self.kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.RBFKernel())

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean(x), self.kernel(x))


likelihood = gpytorch.likelihoods.GaussianLikelihood()
model = GP(x, y, likelihood)
optimizer = torch.optim.Adam(model.parameters(), 0.1)
mll = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
model.train()
for step in range(15):
    optimizer.zero_grad()
    loss = -mll(model(x), y)
    loss.backward()
    optimizer.step()
    if step % 5 == 0:
        print(f"{step}: {loss.item():.5f}")
