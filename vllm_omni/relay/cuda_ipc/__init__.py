"""The slab lies on the GPU. Not yet served: a server never chooses it, and it has not been run on a GPU."""

from vllm_omni.relay.cuda_ipc.relay import CudaIpcRelay

__all__ = ["CudaIpcRelay"]
