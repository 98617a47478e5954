// npm's client libraries against a server that runs: chat, streams, tools, structured output.
//
//   npm install --prefix DIR openai @anthropic-ai/sdk ollama ai @ai-sdk/openai-compatible
//   node tests/clients/npm_clients.mjs DIR http://127.0.0.1:8080 lucevisor-demo-22m
//
// Prints rows of docs/clients.md.

import assert from 'node:assert'
import {readFileSync} from 'node:fs'
import {createRequire} from 'node:module'
import {resolve} from 'node:path'

const [directory, url, model] = process.argv.slice(2)
const require = createRequire(resolve(directory) + '/')
const {OpenAI} = require('openai')
const {Anthropic} = require('@anthropic-ai/sdk')
const {Ollama} = require('ollama')
const {generateText, jsonSchema, Output, streamText, tool} = require('ai')
const {createOpenAICompatible} = require('@ai-sdk/openai-compatible')

const question = 'What does os.path.join do?'
const messages = [{role: 'user', content: question}]
const names = ['os.path.join', 're.sub']
const schema = {type: 'object', properties: {name: {type: 'string', enum: names}}, required: ['name'], additionalProperties: false}
const description = 'Look up a name.'
const named = value => assert(names.includes((typeof value === 'string' ? JSON.parse(value) : value).name))

const openai = new OpenAI({baseURL: `${url}/v1`, apiKey: 'none', maxRetries: 0})
const anthropic = new Anthropic({baseURL: url, apiKey: 'none', maxRetries: 0})
const ollama = new Ollama({host: url})
const ai = createOpenAICompatible({name: 'lucevisor', baseURL: `${url}/v1`, supportsStructuredOutputs: true})(model)
const chat = {model, messages, max_tokens: 200, temperature: 0}
const answer = {model, input: question, max_output_tokens: 20}
const generated = {model: ai, prompt: question, maxOutputTokens: 200, temperature: 0}

async function joined(parts, read) {
  let text = ''
  for await (const part of parts) text += read(part) ?? ''
  assert(text)
}

const features = {
  'openai': {
    'chat': async () => assert((await openai.chat.completions.create(chat)).choices[0].message.content),
    'chat, streamed': async () =>
      joined(await openai.chat.completions.create({...chat, stream: true}), part => part.choices[0]?.delta.content),
    'chat, tool required': async () => {
      const tools = [{type: 'function', function: {name: 'look_up', description, parameters: schema, strict: true}}]
      const {choices} = await openai.chat.completions.create({...chat, tools, tool_choice: 'required'})
      named(choices[0].message.tool_calls[0].function.arguments)
    },
    'chat, json_schema': async () => {
      const response_format = {type: 'json_schema', json_schema: {name: 'x', strict: true, schema}}
      named((await openai.chat.completions.create({...chat, response_format})).choices[0].message.content)
    },
    'responses, also stored': async () => {
      const first = await openai.responses.create(answer)
      assert(first.output_text)
      await joined(await openai.responses.retrieve(first.id, {stream: true}), event => event.delta)
      assert.equal((await openai.responses.inputItems.list(first.id)).data.length, 1)
      const {input_tokens} = await openai.responses.inputTokens.count({model, input: question})
      assert.equal(input_tokens, first.usage.input_tokens)
    },
    'responses, streamed': async () => joined(openai.responses.stream(answer), event => event.delta),
  },
  '@anthropic-ai/sdk': {
    'messages': async () => assert((await anthropic.messages.create(chat)).content[0].text),
    'messages, streamed': async () => assert((await anthropic.messages.stream(chat).finalMessage()).content[0].text),
    'tool_choice any': async () => {
      const tools = [{name: 'look_up', description, input_schema: schema}]
      named((await anthropic.messages.create({...chat, tools, tool_choice: {type: 'any'}})).content.at(-1).input)
    },
    'count_tokens': async () => assert((await anthropic.messages.countTokens({model, messages})).input_tokens),
  },
  'ollama': {
    'chat': async () => assert((await ollama.chat({model, messages})).message.content),
    'chat, streamed': async () => joined(await ollama.chat({model, messages, stream: true}), part => part.message.content),
    'format: a JSON schema': async () =>
      named((await ollama.chat({model, messages, format: schema, options: {temperature: 0}})).message.content),
    'generate, context': async () => {
      const first = await ollama.generate({model, prompt: question, options: {num_predict: 8}})
      const second = await ollama.generate({model, prompt: 'And?', context: first.context, options: {num_predict: 8}})
      assert.deepEqual(second.context.slice(0, first.context.length), first.context)
    },
    'list, ps, show': async () => {
      assert.equal((await ollama.list()).models[0].digest, (await ollama.ps()).models[0].digest)
      assert((await ollama.show({model})).details.parameter_size)
    },
  },
  'ai': {
    'generateText': async () => assert((await generateText(generated)).text),
    'streamText': async () => joined(streamText(generated).textStream, text => text),
    'tool required': async () => {
      const tools = {look_up: tool({description, inputSchema: jsonSchema(schema)})}
      named((await generateText({...generated, tools, toolChoice: 'required'})).toolCalls[0].input)
    },
    'Output.object': async () =>
      named((await generateText({...generated, output: Output.object({schema: jsonSchema(schema)})})).output),
  },
}

for (const [name, tried] of Object.entries(features)) {
  const {version} = JSON.parse(readFileSync(resolve(directory, 'node_modules', name, 'package.json')))
  for (const [feature, use] of Object.entries(tried)) {
    const result = await use().then(() => 'works', error => String(error.message).slice(0, 300))
    console.log(`| npm ${name} ${version} | ${feature} | ${result} |`)
  }
}
