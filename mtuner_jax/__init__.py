"""mtuner-jax: LoRA fine-tuning on several GPUs with planned memory."""
