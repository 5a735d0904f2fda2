// Vercel AI SDK with its provider for such servers: text, streams with usage, objects, tools.
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, streamText, tool } from "ai";
import { z } from "zod";

const provider = createOpenAICompatible({
  name: "sluice",
  baseURL: `${process.env.SLUICE_URL}/v1`,
  apiKey: "none",
  includeUsage: true,
  supportsStructuredOutputs: true,
});
const ask = {
  model: provider(process.env.SLUICE_MODEL),
  prompt: "Hello?",
  temperature: 0,
  maxOutputTokens: 600,
  maxRetries: 0,
};
const whole = await generateText(ask);
const streamed = streamText(ask);
assert.equal(await streamed.text, whole.text);
const usage = await streamed.usage;
assert.ok(usage.outputTokens > 0);
assert.ok((usage.cachedInputTokens ?? 0) <= usage.inputTokens);
const schema = z.object({ answer: z.enum(["yes", "no"]), sure: z.boolean() });
const { object } = await generateObject({ ...ask, schema });
schema.parse(object);
const switched = await generateText({
  ...ask,
  tools: { switch: tool({ inputSchema: z.object({ on: z.boolean() }) }) },
  toolChoice: "required",
});
assert.equal(typeof switched.toolCalls[0].input.on, "boolean");
const { version } = JSON.parse(readFileSync("node_modules/ai/package.json", "utf8"));
console.log(`${version}: generateText, streamText with usage, generateObject, tools`);
