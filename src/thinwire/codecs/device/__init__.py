"""Codecs on a device: chains in torch operations, for tensors that are not in the memory of the host.

On a CPU numpy and the C kernels are faster. On a device they would cost a copy in both directions and a wait for each; here
messages are made and read where the tensors are, without a look from the host. Both make the same bytes of the same
coefficients, and give the same verdict on a damaged message.
"""
