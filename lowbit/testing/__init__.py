"""Contract tests that a tensor subclass of your own inherits.

    from lowbit.testing import TensorContract

    class TestMyTensor(TensorContract):
        def encode(self, weight):
            return MyTensor.from_float(weight)

pytest collects the inherited tests with the class. `TensorContract` holds them all, and each part can be derived alone:

- `BasicContract`: construction, repr, copies, dtypes, devices, slices;
- `AutogradContract`: `F.linear` and the gradients of the input, the bias and, where `trainable`, the weight;
- `CompileContract`: `torch.compile(fullgraph=True)`;
- `FSDP2Contract`, `TensorParallelContract`: two gloo processes against one;
- `TorchSaveContract`: `torch.save` with `weights_only=True`;
- `SerializationContract`: `TorchSaveContract`, `state_dict`, `lowbit.save` and distributed checkpoints.

`Subject` names what a contract needs to know: override its attributes and methods in the test class. The first four
and `TorchSaveContract` take any subclass of torch.Tensor with `dequantize()`; the other two need what
`lowbit.LowbitTensor` gives. `launch` runs a function in several processes.

The tests call assert. `pytest.register_assert_rewrite("lowbit.testing")` in `conftest.py` puts the values into their
messages. `import lowbit` does not import this package, which itself imports pytest only when a test runs.
"""

from lowbit.testing.autograd import AutogradContract
from lowbit.testing.basic import BasicContract
from lowbit.testing.comparison import relative_error, same, same_bits, shares_memory, values
from lowbit.testing.compiled import CompileContract
from lowbit.testing.fsdp2 import FSDP2Contract
from lowbit.testing.launch import ChildError, launch
from lowbit.testing.serialization import SerializationContract, TorchSaveContract
from lowbit.testing.subject import Subject
from lowbit.testing.tensor_parallel import TensorParallelContract


class TensorContract(
    BasicContract,
    AutogradContract,
    CompileContract,
    FSDP2Contract,
    TensorParallelContract,
    SerializationContract,
):
    """All contracts, which lowbit's own weights pass."""


__all__ = [
    "AutogradContract",
    "BasicContract",
    "ChildError",
    "CompileContract",
    "FSDP2Contract",
    "SerializationContract",
    "Subject",
    "TensorContract",
    "TensorParallelContract",
    "TorchSaveContract",
    "launch",
    "relative_error",
    "same",
    "same_bits",
    "shares_memory",
    "values",
]
