"""Checkpoints of all workers of a run: JSON and safetensors files, no pickle, each file with its SHA-256.

    path = thinwire.checkpoint.save(folder, model, optimizer, link)         # on all workers, after the same step
    thinwire.checkpoint.load(thinwire.checkpoint.finished(folder)[-1], model, optimizer, link)
    thinwire.checkpoint.export(model, optimizer, "model.safetensors")       # the shared model alone, for others to read

What is bit-equal on all workers, as the algorithm declares it, is written once; everything else is written by each worker, so
that the momenta of different workers are not mixed. Slots that live in the domain of a codec are plain tensors on every
process, so where a worker is sharded they also have the number of their shard: `momentum@1of2`.

    folder/step-00000040/                   a finished checkpoint
        thinwire.json                       run id, step, settings, parameter groups, and dtype, shape and place of every tensor
        replicated.0.safetensors            what all workers share, as shard 0 of the first worker has it
        worker1.0.safetensors               what is worker 1's own, as its shard 0 has it
        SHA256SUMS                          of all files above; `sha256sum -c SHA256SUMS` checks them without thinwire
    folder/.writing-step-.../               being written, or left by a kill: ignored, and removed by the next save

A checkpoint is written aside and then renamed, so that a kill at any moment leaves the last good one. A step that is saved
twice (by a run that went back to an older checkpoint) becomes step-00000040.1 before the first is removed. Loading verifies
checksums and reads everything into buffers of its own on all workers before anything of the model or the optimizer is changed
on any of them.
"""

from thinwire.checkpoint.api import Resumed, load, save
from thinwire.checkpoint.files import finished, step_of
from thinwire.checkpoint.model_file import export

__all__ = ["Resumed", "export", "finished", "load", "save", "step_of"]
