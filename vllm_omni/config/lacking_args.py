"""Engine arguments of vLLM that have no effect on a stage, because its kind lacks what they are about."""

from __future__ import annotations

from collections.abc import Mapping

_WITHOUT_TOKENS = {
    "quantization": "quantization quantization_config allow_deprecated_quantization",
    "offloading of weights": "offload_backend cpu_offload_gb cpu_offload_params offload_group_size "
    "offload_num_in_group offload_prefetch_step offload_params",
    "compilation": "enforce_eager compilation_config optimization_level performance_mode cudagraph_capture_sizes "
    "max_cudagraph_capture_size cudagraph_metrics jit_monitor_mode jit_monitor_verbose",
    "adapters (LoRA)": "enable_lora max_loras max_lora_rank default_mm_loras fully_sharded_loras max_cpu_loras "
    "lora_dtype lora_target_modules enable_tower_connector_lora specialize_active_lora enable_mixed_moe_lora_format "
    "enable_moe_shared_loras max_lora_cls_labels",
    "KV cache": "block_size enable_prefix_caching prefix_caching_hash_algo prefix_cache_retention_interval "
    "prefix_match_unit kv_cache_dtype kv_cache_dtype_skip_layers kv_cache_memory_bytes gpu_memory_utilization "
    "num_gpu_blocks_override kv_transfer_config kv_events_config kv_offloading_size kv_offloading_backend "
    "kv_sharing_fast_prefill swa_bounded_replay kv_cache_metrics kv_cache_metrics_sample "
    "disable_hybrid_kv_cache_manager watermark",
    "encoder cache": "ec_transfer_config ec_manager_config",
    "draft model": "speculative_config spec_method spec_model spec_tokens per_request_spec_decode_metrics",
    "selectable attention of vLLM": "attention_backend attention_config disable_cascade_attn disable_sliding_window",
    "tokens to choose": "logits_processors structured_outputs_config override_generation_config generation_config "
    "max_logprobs logprobs_mode return_sampling_mask use_fp64_gumbel enable_trace_replay watermark_config "
    "diffusion_config reasoning_parser reasoning_parser_plugin reasoning_config stream_interval",
    "pooling": "runner convert pooler_config io_processor_plugin",
    "random numbers of the engine's own": "seed",
    "tokenizer": "tokenizer tokenizer_mode tokenizer_revision skip_tokenizer_init tokens_only",
    "prompt of tokens or embeddings": "max_model_len enable_prompt_embeds renderer_num_workers",
    "schedule of tokens": "max_num_batched_tokens max_num_scheduled_tokens max_num_active_seqs max_num_queued_tokens "
    "long_prefill_token_threshold long_prefill_token_threshold_adaptive enable_chunked_prefill "
    "disable_chunked_mm_input scheduler_reserve_full_isl prefill_schedule_interval scheduling_policy async_scheduling",
    "media that vLLM processes": "language_model_only limit_mm_per_prompt enable_mm_embeds interleave_mm_strings "
    "media_io_kwargs mm_processor_kwargs mm_processor_cache_gb mm_processor_cache_type mm_hasher_algorithm "
    "mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode mm_encoder_attn_backend mm_encoder_attn_dtype "
    "mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path mm_encoder_fp8_scale_save_margin skip_mm_profiling "
    "video_pruning_rate video_pruning_method mm_tensor_ipc mm_processor_device mm_ipc_gpu_memory_gb "
    "mm_device_do_normalize enable_mm_processor_stats",
    "parallel ranks": "tensor_parallel_size pipeline_parallel_size data_parallel_size prefill_context_parallel_size "
    "decode_context_parallel_size dcp_comm_backend dcp_q_replicate dcp_kv_cache_interleave_size "
    "cp_kv_cache_interleave_size data_parallel_rank data_parallel_start_rank data_parallel_size_local "
    "data_parallel_address data_parallel_rpc_port data_parallel_hybrid_lb data_parallel_external_lb "
    "data_parallel_multi_port_external_lb data_parallel_backend master_addr master_port nnodes node_rank "
    "distributed_timeout_seconds cpu_distributed_timeout_seconds enable_hc_sp enable_batch_sharded_sampling "
    "max_parallel_loading_workers ray_workers_use_nsight disable_custom_all_reduce enable_shm_tensor_arena "
    "enable_nccl_comm_suspend dp_sync_interval disable_nccl_for_dp_synchronization enable_dbo ubatch_size "
    "dbo_decode_token_threshold dbo_prefill_token_threshold enable_fault_tolerance fault_tolerance_config "
    "aggregate_engine_logging",
    "experts": "enable_expert_parallel enable_ep_weight_filter moe_backend all2all_backend enable_elastic_ep "
    "elastic_ep_max_dp_size eplb_config enable_eplb expert_placement_strategy enable_return_routed_experts "
    "aux_output_config",
    "layers of vLLM": "ir_op_priority linear_backend sparse_indexer_topk_backend kernel_config engram_config "
    "enable_flashinfer_autotune model_impl mamba_config mamba_cache_dtype mamba_ssm_cache_dtype mamba_block_size "
    "mamba_cache_mode enable_mamba_shared_prefix_checkpoint replayssm_buffer_len use_replayssm mamba_backend "
    "mamba_ssu_algorithm enable_mamba_cache_stochastic_rounding mamba_cache_philox_rounds gdn_prefill_backend "
    "kda_prefill_backend kda_decode_backend collect_detailed_traces enable_layerwise_nvtx_tracing enable_mfu_metrics",
    "memory pool of vLLM": "enable_sleep_mode sleep_mode_offload_cudagraph sleep_preserve_parameter_names "
    "enable_cumem_allocator",
    "other source of weights": "model_weights weight_transfer_config",
}

_LACKING = {
    "ar": {"engines whose logs could be joined": "aggregate_engine_logging"},
    "generation": _WITHOUT_TOKENS | {"worker": "worker_extension_cls"},
    "diffusion": _WITHOUT_TOKENS
    | {
        "loader of vLLM": "load_format safetensors_load_strategy safetensors_prefetch_num_threads "
        "safetensors_prefetch_block_size model_loader_extra_config ignore_patterns use_tqdm_on_load "
        "pt_load_map_location",
        "class or configuration but diffusers'": "hf_config_path model_class_overrides code_revision",
    },
}

LACKING_ARGS: Mapping[str, Mapping[str, str]] = {
    kind: {name: lacking for lacking, names in groups.items() for name in names.split()}
    for kind, groups in _LACKING.items()
}
"""By engine type: argument -> what stages of this type lack. All other arguments of ``EngineArgs`` have an effect."""
