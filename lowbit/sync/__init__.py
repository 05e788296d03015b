"""The weights of a model in training, to the servers that generate with it.

    group = lowbit.sync.connect("10.0.0.1:29600", rank=0, size=2)                   # the trainer
    lowbit.sync.send(model, group, "compressed-tensors")                            # after each step

    group, known = lowbit.sync.connect("10.0.0.1:29600", rank=1, size=2), {}        # a server
    served.load_weights(lowbit.sync.receive(group, known=known))                    # before it generates again

The model is plain, quantized or prepared for training, and may be sharded by FSDP2. What travels are packed tensors in
the names of a format of `lowbit.export`, with the bits that `convert_` and `export` would give. Nothing of the model
changes, and it is never whole in memory a second time.

`stream` gives the tensors; `send` and `receive` bring them to other processes, `write` and `read` through a folder;
`load_` copies them into a module.
"""

from lowbit.sync.channels import connect
from lowbit.sync.streaming import load_, read, stream, write
from lowbit.sync.transfer import Sent, SyncError, receive, send

__all__ = ["Sent", "SyncError", "connect", "load_", "read", "receive", "send", "stream", "write"]
