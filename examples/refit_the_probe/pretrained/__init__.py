"""`paper-pretrained`: language models fine-tuned on formal tasks, then measured like the formal ones."""
