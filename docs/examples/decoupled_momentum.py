"""Decoupled momentum (DeMo) on two simulated workers: 1-bit messages, with a momentum in the domain of the DCT."""

import torch

import thinwire
from thinwire import DCT, Mean, Sign, TopK
from thinwire.core.average import message_nbytes

chain, lr, decay = DCT(64) >> TopK(32) >> Sign(), 1e-2, 0.9


def train(link, rounds=300):
    torch.manual_seed(0)  # every worker starts from the same weights
    model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
    params = list(model.parameters())
    momentum = [torch.zeros(shape) for shape in chain.slot_shapes(params)]  # this worker's own
    data = torch.Generator().manual_seed(1 + link.rank)
    for round in range(rounds):
        x = torch.randn(32, 8, generator=data)
        loss = (model(x) - x.sum(1, keepdim=True)).square().mean()
        grads = torch.autograd.grad(loss, params)
        # momentum <- decay * momentum + DCT(grads), and its largest coefficients travel: the network line
        got = thinwire.share(link, chain, momentum, grads, round=round, decay=decay, scale=1.0, mean=Mean(over="senders"))
        link.commit()
        got.take_from(momentum)  # exactly what the others read in this worker's message
        for _, p, mean in got.each(params):  # piece by piece, without a second copy of the model
            p.sub_(mean.sign_(), alpha=lr * (1 - round / rounds))
    with torch.no_grad():
        x = torch.randn(1000, 8, generator=torch.Generator().manual_seed(0))
        return (model(x) - x.sum(1, keepdim=True)).square().mean().item(), message_nbytes(link, chain, params)


if __name__ == "__main__":
    (loss, sent), other = thinwire.World(2).run(train)
    print(f"validation loss {loss:.4f} on both workers, {sent} bytes per worker and step")
    assert (loss, sent) == other
