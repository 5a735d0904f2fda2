// Vercel AI SDK, its provider for such servers and OpenAI's own: text, streams with usage, objects, tools, errors.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { APICallError, generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const model = process.env.SLUICE_MODEL;
const at = { baseURL: `${process.env.SLUICE_URL}/v1`, apiKey: process.env.OPENAI_API_KEY };
const compatible = createOpenAICompatible({
  name: "sluice",
  ...at,
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const openai = createOpenAI(at);
const schema = z.object({ answer: z.enum(["yes", "no"]), sure: z.boolean() });
const light = { inputSchema: z.object({ on: z.boolean() }) };

async function check(chat) {
  const ask = { model: chat, prompt: "Hello?", temperature: 0, maxOutputTokens: 600, maxRetries: 0 };
  const whole = await generateText({ ...ask, system: "Be brief." });
  const streamed = streamText({ ...ask, system: "Be brief." });
  assert.equal(await streamed.text, whole.text);
  for (const usage of [whole.usage, await streamed.usage]) {
    assert.ok(usage.inputTokens > 0 && usage.outputTokens > 0);
    assert.equal(usage.totalTokens, usage.inputTokens + usage.outputTokens);
    assert.ok(usage.inputTokenDetails.cacheReadTokens <= usage.inputTokens);
  }
  assert.equal((await streamed.usage).totalTokens, whole.usage.totalTokens);
  const output = Output.object({ schema });
  schema.parse((await generateText({ ...ask, output })).output);
  schema.parse(await streamText({ ...ask, output }).output);
  const required = { ...ask, tools: { light: tool(light) }, toolChoice: "required" };
  const [call] = (await generateText(required)).toolCalls;
  assert.equal(typeof call.input.on, "boolean");
  const [pieced] = await streamText(required).toolCalls;
  assert.deepEqual(pieced.input, call.input);
  const execute = ({ on }) => `is ${on ? "on" : "off"}`;
  const steps = { tools: { light: tool({ ...light, execute }) }, stopWhen: isStepCount(2) };
  assert.equal((await generateText({ ...required, ...steps })).steps.length, 2);
  const leaving = new AbortController();
  const left = streamText({ ...ask, abortSignal: leaving.signal });
  for await (const part of left.fullStream) if (part.type === "text-delta") leaving.abort();
}

await check(compatible(model));
await check(openai.chat(model));
const { text } = await generateText({ model: compatible.completionModel(model), prompt: "def f(" });
assert.ok(text.length > 0);
await assert.rejects(
  generateText({ model: compatible("gpt-5"), prompt: "Hello?", maxRetries: 0 }),
  (error) => APICallError.isInstance(error) && error.statusCode === 404 && !error.isRetryable,
);
const { version } = JSON.parse(readFileSync("node_modules/ai/package.json", "utf8"));
console.log(
  `${version}: openai-compatible and openai.chat: text, stream with usage, objects, tool steps, abort, errors`,
);
