"""The slab lies on the GPU. A server chooses it for two stages on one GPU."""

from vllm_omni.relay.cuda_ipc.relay import CudaIpcRelay

__all__ = ["CudaIpcRelay"]
