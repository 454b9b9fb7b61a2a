"""Optimizers before and after apex.amp.initialize."""

import torch
from apex import amp
from apex.parallel import DistributedDataParallel


def made_again(net, data):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net, optimizer = amp.initialize(net, optimizer)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    train(model, optimizer, data)


def prepared_again(net, data):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net, optimizer = amp.initialize(net, optimizer)
    other = torch.optim.SGD(net.parameters(), 0.1)
    net, other = amp.initialize(net, other)
    train(net, optimizer, data)


def of_another_model(net, small, data):
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    net, optimizer = amp.initialize(net, optimizer)
    plain = torch.optim.SGD(small.parameters(), 0.1)
    train(net, optimizer, data)
    train_plainly(small, plain)


def train(model, optimizer, data):
    for x in data:
        with amp.scale_loss(model(x).sum(), optimizer) as loss:
            loss.backward()
        optimizer.step()
