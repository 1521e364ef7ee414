"""Settings of Axolotl, LLaMA-Factory and TRL, and what they are called here.

Nothing of it is taken over silently: a pasted file is refused with this beside each key
(`written_settings`). Names that mean the same everywhere need no row.
"""

# Another tool's name -> ours; values mean the same.
SAME = {
    "base_model": "model",
    "model_id": "model",
    "tokenizer_name_or_path": "model",
    "sequence_len": "max_length",
    "cutoff_len": "max_length",
    "max_seq_length": "max_length",
    "max_seq_len": "max_length",
    "model_max_length": "max_length",
    "sample_packing": "packing",
    "neat_packing": "packing",
    "eval_sample_packing": "packing",
    "micro_batch_size": "per_device_train_batch_size",
    "train_batch_size": "global_batch_size",
    "num_epochs": "num_train_epochs",
    "lr": "learning_rate",
    "lr_scheduler": "lr_scheduler_type",
    "val_set_size": "val_size",
    "dataset_name": "dataset.path",
    "dataset_path": "dataset.path",
    "datasets": "dataset.path",
    "test_datasets": "eval_dataset",
    "lora_r": "lora.r",
    "lora_rank": "lora.r",
    "lora_alpha": "lora.lora_alpha",
    "lora_dropout": "lora.lora_dropout",
    "lora_target_modules": "lora.target_modules",
    "use_rslora": "lora.use_rslora",
    "peft_use_rslora": "lora.use_rslora",
    "torch_dtype": "dtype",
    "auto_resume_from_checkpoints": "resume_from_checkpoint",
    "logging_dir": "output_dir",
    "data_seed": "seed",
    "full_determinism": "deterministic",
}
# (another tool's name, its value) -> (ours, its value), where the value changes too.
CHANGED = {
    ("lora_target_linear", "true"): ("lora.target_modules", "all-linear"),
    ("lora_target", "all"): ("lora.target_modules", "all-linear"),
    ("bf16", "true"): ("dtype", "bfloat16"),
    ("bf16", "auto"): ("dtype", "auto"),
    ("fp16", "true"): ("dtype", "bfloat16"),
    ("pure_bf16", "true"): ("dtype", "bfloat16"),
    ("train_on_inputs", "true"): ("dataset.train_on", "all"),
    ("assistant_only_loss", "true"): ("dataset.train_on", "assistant"),
    ("completion_only_loss", "true"): ("dataset.train_on", "completion"),
    ("attn_implementation", "eager"): ("attention", "xla"),
    ("attn_implementation", "sdpa"): ("attention", "xla"),
    ("evaluation_strategy", "no"): ("eval_steps", "0"),
    ("eval_strategy", "no"): ("eval_steps", "0"),
}
_EVAL_STEPS = "write eval_steps, in optimizer steps"
_SAVE_STEPS = "write save_steps, in optimizer steps"
_EVAL_ROWS = "remove it: an evaluation takes as many rows as a step"
_TEMPLATE = (
    "write dataset.chat_template: a Jinja file; without, the tokenizer's is used"
)
_ATTENTION = "remove it: attention: auto takes the fastest"
_SHARDED = "remove it: plan: auto shards the weights over the devices"
_UNQUANTISED = "remove it: weights are kept in dtype: bfloat16 and sharded"
_ADAMW = "remove it: AdamW is the one optimizer (adam_beta1, weight_decay, ...)"
_ALWAYS = "remove it: every run is supervised LoRA"
_FOUND = "remove it: config.json says it"
_NOT_NEEDED = "remove it: nothing here needs it"
_MISSING = "remove it: not implemented"
# Another tool's name -> why there is no such setting here.
REASONS = {
    name: reason
    for reason, names in {
        "write lora.target_modules with its value": "lora_target",
        _TEMPLATE: "chat_template template",
        "remove it: only answers are trained (dataset.train_on)": "train_on_inputs "
        "assistant_only_loss completion_only_loss",
        _ATTENTION: "flash_attention flash_attn attn_implementation "
        "xformers_attention sdp_attention",
        _EVAL_STEPS: "evals_per_epoch eval_strategy evaluation_strategy",
        _SAVE_STEPS: "saves_per_epoch save_strategy",
        _EVAL_ROWS: "per_device_eval_batch_size eval_batch_size",
        _SHARDED: "deepspeed fsdp fsdp_config",
        _UNQUANTISED: "quantization_bit quantization_method load_in_4bit load_in_8bit",
        _ADAMW: "optim optimizer",
        _ALWAYS: "stage do_train do_eval finetuning_type adapter use_peft use_lora "
        "lora_task_type task_type peft_type",
        _FOUND: "model_type tokenizer_type tokenizer_config is_llama_derived_model",
        _NOT_NEEDED: "pad_to_sequence_len group_by_length overwrite_cache do_predict "
        "overwrite_output_dir preprocessing_num_workers dataloader_num_workers "
        "dataset_processes ddp_timeout dataset_prepared_path trust_remote_code "
        "save_only_model tf32 local_rank debug remove_unused_columns "
        "dataset_text_field gradient_checkpointing_kwargs dataset_train_split "
        "dataset_test_split dataset_config dataset_num_proc dataset_dir log_level "
        "logging_strategy "
        "logging_first_step use_reentrant special_tokens save_safetensors bf16 fp16 "
        "eval_table_size pure_bf16 lora_target_linear gpu_memory_limit lora_model_dir "
        "ddp_find_unused_parameters unfrozen_parameters",
        _MISSING: "wandb_project wandb_entity wandb_watch wandb_name wandb_log_model "
        "run_name push_to_hub hub_model_id hub_strategy neftune_noise_alpha use_dora "
        "lora_modules_to_save modules_to_save use_unsloth enable_liger_kernel "
        "additional_target",
    }.items()
    for name in names.split()
}


def renamed(asked: str, value: str) -> tuple[str, str] | None:
    """Our setting and its value for another tool's; None where there is none.

    Args:
      asked: The other tool's name.
      value: What was written, where it is one word; empty for lists and maps.
    """
    if (asked, value.lower()) in CHANGED:
        return CHANGED[asked, value.lower()]
    return (SAME[asked], value) if asked in SAME else None
