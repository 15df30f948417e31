"""`paper-pretrain`: small language models of Python, pretrained as stand-ins."""
