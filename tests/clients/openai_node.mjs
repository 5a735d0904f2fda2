// openai-node: whole, streamed, tools, an aborted stream, error classes.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { VERSION } from "openai/version";

const model = process.env.SLUICE_MODEL;
const client = new OpenAI({ baseURL: `${process.env.SLUICE_URL}/v1`, apiKey: "none" });
const ask = {
  model,
  messages: [{ role: "user", content: "Hello?" }],
  temperature: 0,
  max_tokens: 400,
};
const whole = await client.chat.completions.create(ask);
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
const parameters = {
  type: "object",
  properties: { on: { type: "boolean" } },
  required: ["on"],
};
const tools = [{ type: "function", function: { name: "switch", parameters } }];
const runner = client.chat.completions.stream({ ...ask, tools, tool_choice: "required" });
const final = await runner.finalChatCompletion();
const [call] = final.choices[0].message.tool_calls;
assert.equal(typeof JSON.parse(call.function.arguments).on, "boolean");
const stream = await client.chat.completions.create({ ...ask, max_tokens: 2000, stream: true });
for await (const _ of stream) {
  stream.controller.abort();
  break;
}
await assert.rejects(
  client.chat.completions.create({ ...ask, model: "gpt-5" }),
  (error) => error instanceof OpenAI.NotFoundError && error.code === "model_not_found",
);
console.log(`${VERSION}: whole, stream, tools, abort, errors`);
