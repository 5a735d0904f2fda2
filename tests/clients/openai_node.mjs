// openai-node: whole, streamed, parse and runTools with zod, completions, leaving early, error classes.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodFunction, zodResponseFormat } from "openai/helpers/zod";
import { VERSION } from "openai/version";
import { z } from "zod";

const model = process.env.SLUICE_MODEL;
const client = new OpenAI({ baseURL: `${process.env.SLUICE_URL}/v1`, maxRetries: 0 });
const ask = {
  model,
  messages: [{ role: "user", content: "Hello?" }],
  temperature: 0,
  max_tokens: 400,
};
const { data: whole, response } = await client.chat.completions.create(ask).withResponse();
assert.equal(response.headers.get("x-request-id"), whole.id);
assert.ok(whole.usage.completion_tokens > 0);
let text = "";
let usage = null;
const options = { stream: true, stream_options: { include_usage: true } };
for await (const chunk of await client.chat.completions.create({ ...ask, ...options })) {
  text += chunk.choices[0]?.delta.content ?? "";
  usage = chunk.usage ?? usage;
}
assert.equal(text, whole.choices[0].message.content);
assert.equal(usage.total_tokens, whole.usage.total_tokens);

const verdict = z.object({ answer: z.enum(["yes", "no"]), sure: z.boolean() });
const form = { response_format: zodResponseFormat(verdict, "verdict") };
const parsed = await client.chat.completions.parse({ ...ask, ...form });
verdict.parse(parsed.choices[0].message.parsed);
const tool = { name: "switch", parameters: z.object({ on: z.boolean() }) };
const tools = { tools: [zodFunction(tool)], tool_choice: "required" };
const runner = client.chat.completions.stream({ ...ask, ...tools });
const deltas = [];
runner.on("tool_calls.function.arguments.delta", (delta) => deltas.push(delta.arguments_delta));
const [call] = (await runner.finalChatCompletion()).choices[0].message.tool_calls;
assert.equal(typeof call.function.parsed_arguments.on, "boolean");
assert.ok(deltas.length > 0);
const results = [];
const work = zodFunction({ ...tool, function: ({ on }) => (results.push(on), "done") });
const named = { tools: [work], tool_choice: { type: "function", function: { name: "switch" } } };
await client.chat.completions.runTools({ ...ask, ...named }).done();
assert.equal(typeof results[0], "boolean");

const texts = await client.completions.create({
  model,
  prompt: ["def f(", "a"],
  temperature: 0,
  max_tokens: 4,
  logprobs: 1,
  echo: true,
});
assert.ok(texts.choices[0].text.startsWith("def f("));
assert.equal(texts.choices[1].logprobs.tokens.length, texts.choices[1].logprobs.text_offset.length);

const stream = await client.chat.completions.create({ ...ask, max_tokens: 2000, stream: true });
for await (const _ of stream) {
  stream.controller.abort();
  break;
}
const hasty = { timeout: 50 };
await assert.rejects(
  client.chat.completions.create({ ...ask, max_tokens: 2000 }, hasty),
  OpenAI.APIConnectionTimeoutError,
);
const refusals = [
  [{ model: "gpt-5" }, OpenAI.NotFoundError, "model_not_found"],
  [{ max_tokens: 1_000_000 }, OpenAI.BadRequestError, "context_length_exceeded"],
];
for (const [change, kind, code] of refusals) {
  await assert.rejects(
    client.chat.completions.create({ ...ask, ...change }),
    (error) => error instanceof kind && error.code === code,
  );
}
const stranger = client.withOptions({ apiKey: "sk-nobody" });
await assert.rejects(stranger.chat.completions.create(ask), OpenAI.AuthenticationError);
console.log(`${VERSION}: whole, stream, zod parse, tools streamed and run, completions, abort, errors`);
