"""Baseline clients: how people send a data set to an inference server from Python.

One process, one event loop, a semaphore, and a JSONL file that gets one line per finished prompt. `openai` is the SDK's
AsyncOpenAI, `aiohttp` speaks HTTP by hand. Both ask for token ids and keep ids, reasoning, content and usage.

They are written as a careful user writes them, neither tuned nor handicapped: default settings, except that the connection
pool is as large as the number of requests in flight and the time limit is an hour (with the SDK's default of 5 s to connect, a
busy event loop lets its own connections time out). What they lack (retries by hand, resume, checkpoints) costs them nothing here.
"""

import argparse
import asyncio
import json
import pathlib
import sys

MAX_TOKENS = 4096
TEMPERATURE = 0.7
TIME_LIMIT_SECONDS = 3600


class Output:
    """The growing JSONL file. Each record is flushed to the kernel, none is synced to the disk."""

    def __init__(self, path):
        self.file = open(path, "w", encoding="utf-8")

    def append(self, record):
        self.file.write(json.dumps(record, ensure_ascii=False) + "\n")
        self.file.flush()


class Answer:
    """What a stream adds up to."""

    def __init__(self):
        self.id = self.finish_reason = self.usage = None
        self.reasoning, self.content, self.token_ids = [], [], []

    def add(self, reasoning, content, token_ids, finish_reason):
        if reasoning:
            self.reasoning.append(reasoning)
        if content:
            self.content.append(content)
        if token_ids:
            self.token_ids.extend(token_ids)
        if finish_reason:
            self.finish_reason = finish_reason

    def record(self, prompt):
        return record_of(
            prompt, self.id, "".join(self.reasoning), "".join(self.content), self.token_ids, self.finish_reason, self.usage
        )


def record_of(prompt, answer_id, reasoning, content, token_ids, finish_reason, usage):
    return {
        "id": prompt["id"],
        "prompt": prompt["prompt"],
        "response_id": answer_id,
        "reasoning": reasoning,
        "content": content,
        "token_ids": token_ids,
        "finish_reason": finish_reason,
        "usage": usage,
    }


def messages_of(prompt):
    return [{"role": "user", "content": prompt["prompt"]}]


class OpenAiClient:
    def __init__(self, options):
        import openai

        http_client = None
        if options.concurrency > 1000:
            # The SDK's default pool stops at 1,000 connections.
            limits = type(openai.DEFAULT_CONNECTION_LIMITS)(
                max_connections=options.concurrency, max_keepalive_connections=options.concurrency
            )
            http_client = openai.DefaultAsyncHttpxClient(limits=limits)
        self.client = openai.AsyncOpenAI(
            base_url=f"{options.url}/v1", api_key="none", http_client=http_client, timeout=TIME_LIMIT_SECONDS
        )
        self.request = {
            "model": options.model,
            "max_tokens": MAX_TOKENS,
            "temperature": TEMPERATURE,
            "extra_body": {"return_token_ids": True},
        }

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.client.close()

    async def whole(self, prompt):
        reply = await self.client.chat.completions.create(messages=messages_of(prompt), **self.request)
        choice = reply.choices[0]
        return record_of(
            prompt,
            reply.id,
            getattr(choice.message, "reasoning", None),
            choice.message.content,
            getattr(choice, "token_ids", None),
            choice.finish_reason,
            reply.usage.model_dump(),
        )

    async def stream(self, prompt):
        answer = Answer()
        chunks = await self.client.chat.completions.create(
            messages=messages_of(prompt), stream=True, stream_options={"include_usage": True}, **self.request
        )
        async for chunk in chunks:
            answer.id = chunk.id
            if chunk.usage:
                answer.usage = chunk.usage.model_dump()
            if not chunk.choices:
                continue
            choice = chunk.choices[0]
            answer.add(
                getattr(choice.delta, "reasoning", None),
                choice.delta.content,
                getattr(choice, "token_ids", None),
                choice.finish_reason,
            )
        return answer.record(prompt)


class AiohttpClient:
    def __init__(self, options):
        import aiohttp

        self.session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=options.concurrency), timeout=aiohttp.ClientTimeout(total=TIME_LIMIT_SECONDS)
        )
        self.url = f"{options.url}/v1/chat/completions"
        self.request = {
            "model": options.model,
            "max_tokens": MAX_TOKENS,
            "temperature": TEMPERATURE,
            "return_token_ids": True,
        }

    async def __aenter__(self):
        return self

    async def __aexit__(self, *_):
        await self.session.close()

    async def whole(self, prompt):
        body = {**self.request, "messages": messages_of(prompt)}
        async with self.session.post(self.url, json=body) as response:
            response.raise_for_status()
            reply = await response.json()
        choice = reply["choices"][0]
        message = choice["message"]
        return record_of(
            prompt,
            reply["id"],
            message.get("reasoning"),
            message["content"],
            choice.get("token_ids"),
            choice["finish_reason"],
            reply["usage"],
        )

    async def stream(self, prompt):
        body = {**self.request, "messages": messages_of(prompt), "stream": True, "stream_options": {"include_usage": True}}
        answer = Answer()
        async with self.session.post(self.url, json=body) as response:
            response.raise_for_status()
            async for line in response.content:
                if not line.startswith(b"data: "):
                    continue
                data = line[6:].strip()
                if data == b"[DONE]":
                    continue
                chunk = json.loads(data)
                answer.id = chunk["id"]
                if chunk.get("usage"):
                    answer.usage = chunk["usage"]
                if not chunk["choices"]:
                    continue
                choice = chunk["choices"][0]
                delta = choice["delta"]
                answer.add(delta.get("reasoning"), delta.get("content"), choice.get("token_ids"), choice.get("finish_reason"))
        return answer.record(prompt)


CLIENTS = {"openai": OpenAiClient, "aiohttp": AiohttpClient}


async def generate(options):
    prompts = [json.loads(line) for line in open(options.dataset, encoding="utf-8")]
    output = Output(options.output)
    in_flight = asyncio.Semaphore(options.concurrency)
    async with CLIENTS[options.client](options) as client:
        send = client.whole if options.no_stream else client.stream

        async def one(prompt):
            async with in_flight:
                output.append(await send(prompt))

        await asyncio.gather(*[one(prompt) for prompt in prompts])


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("client", choices=CLIENTS)
    parser.add_argument("--url", required=True, help="the server, without /v1")
    parser.add_argument("--dataset", required=True, type=pathlib.Path, help="JSONL with id and prompt")
    parser.add_argument("--output", required=True, type=pathlib.Path)
    parser.add_argument("--model", required=True)
    parser.add_argument("--concurrency", required=True, type=int)
    parser.add_argument("--no-stream", action="store_true")
    asyncio.run(generate(parser.parse_args()))


if __name__ == "__main__":
    sys.exit(main())
