"""Turns a GGUF file of a Llama model into the directory that vLLM loads. Runs in the lab's own Python (torch, transformers, gguf).

usage: convert_gguf.py MODEL.gguf OUT_DIR

The weights are read back from their quantised form, so they are not the ones the model was published with; for a test of a
client that does not matter. transformers marks a model read from GGUF as not savable, so its tensors go into a fresh one.
"""

import os
import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

# What the reader adds to a configuration and no other reader should see.
TRACES_OF_THE_READER = ("quantization_config", "_name_or_path", "_model_name_or_path")
CONTEXT_TOKENS = 8192
BEGIN, END = 1, 2  # <|im_start|> and <|im_end|>


def fresh_model(read):
    """The same network without the marks of its origin."""
    settings = {key: value for key, value in read.config.to_dict().items() if key not in TRACES_OF_THE_READER}
    settings.update(dtype="bfloat16", architectures=["LlamaForCausalLM"])
    model = LlamaForCausalLM(LlamaConfig(**settings))
    left = model.load_state_dict(read.state_dict(), strict=False)
    # The head shares the embedding's tensor and is the only one that may be missing.
    if left.unexpected_keys or set(left.missing_keys) - {"lm_head.weight"}:
        sys.exit(f"the file does not hold this model: {left}")
    model.tie_weights()
    model.generation_config = GenerationConfig(bos_token_id=BEGIN, eos_token_id=END, pad_token_id=END)
    return model.to(torch.bfloat16)


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    gguf, out = sys.argv[1:]
    directory, name = os.path.split(os.path.abspath(gguf))
    tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=name)
    model = fresh_model(AutoModelForCausalLM.from_pretrained(directory, gguf_file=name, dtype=torch.float32))
    # Into a scratch directory first: a half-written model must not look like a whole one.
    scratch = out + ".unfinished"
    model.save_pretrained(scratch)
    tokenizer.model_max_length = CONTEXT_TOKENS
    tokenizer.save_pretrained(scratch)
    os.rename(scratch, out)
    print(f"wrote {out}")


if __name__ == "__main__":
    main()
