"""Codes and scales that do not train: weights for inference, states of optimizers. Trained weights import this page."""

from lowbit.tensor.frozen.affine_tensor import AffineTensor as AffineTensor
from lowbit.tensor.frozen.conv_tensor import ConvTensor as ConvTensor
from lowbit.tensor.frozen.conv_tensor import check_convolution as check_convolution
from lowbit.tensor.frozen.conv_tensor import matrix_shape as matrix_shape
from lowbit.tensor.frozen.cpu_values import ReadOnCpu as ReadOnCpu
from lowbit.tensor.frozen.float8_tensor import Float8Tensor as Float8Tensor
