"""A tiny GPT-2 trained by Hugging Face's Trainer under a Guard."""
