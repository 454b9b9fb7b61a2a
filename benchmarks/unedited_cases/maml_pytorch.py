"""dragen1860/MAML-Pytorch: a Learner that overrides parameters()."""

import torch
from torch import nn
from torch.nn import functional as F

torch.manual_seed(222)


class Learner(nn.Module):
    def __init__(self):
        super().__init__()
        self.vars = nn.ParameterList()
        for a, b in ((64, 256), (256, 256), (256, 5)):
            self.vars.append(nn.init.kaiming_normal_(nn.Parameter(torch.ones(b, a))))
            self.vars.append(nn.Parameter(torch.zeros(b)))

    def forward(self, x, vars=None):
        vars = self.vars if vars is None else vars
        for k in range(0, 6, 2):
            x = F.linear(x, vars[k], vars[k + 1])
            x = F.relu(x) if k < 4 else x
        return x

    def parameters(self):
        return self.vars


class Meta(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = Learner()
        self.meta_optim = torch.optim.Adam(self.net.parameters(), lr=1e-3)

    def forward(self, x_spt, y_spt, x_qry, y_qry):
        losses = 0
        for i in range(len(x_spt)):
            fast = list(self.net.parameters())
            for _ in range(2):
                grad = torch.autograd.grad(
                    F.cross_entropy(self.net(x_spt[i], fast), y_spt[i]), fast, create_graph=True
                )
                fast = [p - 0.01 * g for p, g in zip(fast, grad)]
            losses = losses + F.cross_entropy(self.net(x_qry[i], fast), y_qry[i])
        self.meta_optim.zero_grad()
        (losses / len(x_spt)).backward()
        self.meta_optim.step()
        return losses.item() / len(x_spt)


maml = Meta()
for step in range(10):
    y_spt, y_qry = torch.randint(0, 5, (4, 25)), torch.randint(0, 5, (4, 40))
    loss = maml(torch.randn(4, 25, 64), y_spt, torch.randn(4, 40, 64), y_qry)
    if step % 3 == 0:
        print(f"step: {step} {loss:.5f}")
