-- uses: keys, numbers, server, pictures, requests, pending
-- Every request ends here: it gets its last event and a result made of its log, and leaves its queue and lease.

local STATE_AFTER = {
  stop = 'completed', length = 'completed', cancelled = 'cancelled', expired = 'expired',
  error = 'failed',
}
local OUTPUTS = keys.prefix .. 'outputs'
local MAX_OUTPUTS = 128 -- the p90 of output is measured over this number of finished requests
-- A request with a webhook is kept at least for this time, because all attempts to deliver it take a day.
local WEBHOOK_MS = 26 * 3600000

local GUESSES = keys.prefix .. 'statistics:guesses'

local finished = {[OUTPUTS] = {}, [GUESSES] = {}} -- newest last
server.at_the_end(function()
  for key, entries in pairs(finished) do
    if #entries > 0 then
      server.for_all(redis.pcall, 'LPUSH', key, entries)
      redis.pcall('LTRIM', key, 0, MAX_OUTPUTS - 1)
      finished[key] = {}
    end
  end
end)

-- The last entries of two numbers, newest first.
local function read_pairs(key)
  local entries, found = redis.pcall('LRANGE', key, 0, -1), {}
  for _, entry in ipairs(entries.err and {} or entries) do
    local first, second = string.match(entry, '^(%d+) (%d+)$')
    if first then found[#found + 1] = {tonumber(first), tonumber(second)} end
  end
  return found
end

-- The last requests that finished, newest first: {{time (ms), output tokens}, ...}.
function ending.read_outputs() return read_pairs(OUTPUTS) end

-- The last requests that finished and had an expected output: {{expected tokens, output tokens}, ...}.
function ending.read_guesses() return read_pairs(GUESSES) end

-- How long logs and hashes are kept after the end (ms). A hash is kept at least as long as its log, because
-- an id may be used again once its hash is gone.
local function log_ttl() return server.number('log_ttl_ms', 60000) end
function ending.result_ttl() return math.max(log_ttl(), server.number('result_ttl_ms', 3600000)) end

-- Whether a payload names a webhook. A claim notes this in the request's field `webhook`, so that the end need
-- not read the payload, which may be large.
function ending.wants_webhook(payload)
  return payload and string.find(payload, '"webhook_url"', 1, true) ~= nil
end

-- Whether a decoded entry of a log is an event in a worker's form. A stranger may have written another entry.
local function is_event(value)
  if type(value) ~= 'table' or type(value.text) ~= 'string' or type(value.token_ids) ~= 'table' then
    return false
  end
  for at, token_id in pairs(value.token_ids) do
    if type(at) ~= 'number' or type(token_id) ~= 'number' then return false end
    if token_id % 1 ~= 0 or token_id < 0 or token_id >= 2 ^ 53 then return false end
  end
  return true
end

-- JSON of a decoded value, or nil if JSON cannot express it, such as a number that became infinite.
local function encoded(value)
  local worked, text = pcall(cjson.encode, value)
  return worked and text or nil
end

-- The log and the last event as one result. Entries that are not events are left out. Arrays are built by
-- hand, because cjson would turn an empty one into {}.
local function fold_log(id, last_event)
  local texts, token_ids, logprobs, first, last = {}, {}, {}, nil, {}
  local events = requests.log_events(id)
  events[#events + 1] = last_event
  for _, json in ipairs(events) do
    local parsed, event = pcall(cjson.decode, json)
    if parsed and is_event(event) then
      first, last = first or event, event
      texts[#texts + 1] = event.text
      for _, token_id in ipairs(event.token_ids) do token_ids[#token_ids + 1] = numbers.exact(token_id) end
      for _, item in ipairs(type(event.logprobs) == 'table' and event.logprobs or {}) do
        logprobs[#logprobs + 1] = type(item) == 'table' and encoded(item) or nil
      end
    end
  end
  local parts = {
    '"text":' .. cjson.encode(table.concat(texts)),
    '"token_ids":[' .. table.concat(token_ids, ',') .. ']',
    '"logprobs":' .. (#logprobs > 0 and '[' .. table.concat(logprobs, ',') .. ']' or 'null'),
  }
  for _, name in ipairs({'finish_reason', 'usage', 'stats', 'error'}) do
    local value = last[name]
    local text = (type(value) == 'string' or type(value) == 'table') and encoded(value)
    if text then parts[#parts + 1] = cjson.encode(name) .. ':' .. text end
  end
  for _, name in ipairs({'prompt_logprobs', 'prompt_texts'}) do
    local value = first and first[name]
    local text = type(value) == 'table' and #value > 0 and encoded(value)
    if text then parts[#parts + 1] = cjson.encode(name) .. ':' .. text end
  end
  return '{' .. table.concat(parts, ',') .. '}'
end

-- A last event that no worker made. It has only the reason, the usage so far and, if given, an error.
local function bare_last_event(index, attempt, prompt_tokens, reason, error_type, message)
  local event = string.format(
    '{"index":%d,"token_ids":[],"text":"","logprobs":null,"finish_reason":"%s","attempt":%d,' ..
    '"usage":{"prompt_tokens":%d,"completion_tokens":%d,"cached_tokens":0}',
    index, reason, attempt, prompt_tokens, index)
  if error_type then
    event = event .. ',"error":{"type":' .. cjson.encode(error_type) ..
      ',"message":' .. cjson.encode(message) .. '}'
  end
  return event .. '}'
end

-- Append and publish the last event, store the result, and remove the request from its queue and lease. `count`,
-- as text, is the number of tokens up to the event's end. `fields` has the request's tenant, its pictures and
-- whether it has a webhook. A worker may pass the `result`; otherwise it is made of the log before anything is
-- written.
function ending.finish(id, reason, count, event, fields, result)
  result = result or fold_log(id, event)
  redis.pcall('XADD', keys.tokens(id), count .. '-1', 'event', event)
  redis.pcall('PEXPIRE', keys.tokens(id), log_ttl())
  requests.publish_event(id, event)
  local key = keys.request(id)
  redis.pcall('HSET', key, 'state', STATE_AFTER[reason], 'finish_reason', reason,
    'finished_at', server.now_text, 'last_event', event, 'result', result)
  local ttl = ending.result_ttl()
  if fields.webhook then
    redis.pcall('ZADD', keys.prefix .. 'webhooks', server.now_text, id)
    redis.pcall('ZREMRANGEBYSCORE', keys.prefix .. 'webhooks', '-inf', numbers.exact(server.now - WEBHOOK_MS))
    ttl = math.max(ttl, WEBHOOK_MS)
  end
  redis.pcall('PEXPIRE', key, numbers.exact(ttl))
  if fields.pictures then pictures.let_go(id, fields.pictures, ttl) end
  requests.drop_holds(id, fields.tenant)
  local has_output = count ~= '0' -- an embedding has none
  if (reason == 'stop' or reason == 'length') and has_output then
    table.insert(finished[OUTPUTS], server.now_text .. ' ' .. count)
    local guess = numbers.whole(fields.expected_tokens)
    if guess then table.insert(finished[GUESSES], numbers.exact(guess) .. ' ' .. count) end
  end
end

-- End a request without a worker: cancelled, expired, or an error. Returns false if it had ended already.
function ending.finish_bare(id, reason, error_type, message)
  local fields = requests.read(id, 'attempt', 'prompt_tokens', 'state', 'tenant', 'tokens', 'payload', 'pictures') or {}
  local count, ended = requests.log_top(id)
  pending.leave(id, fields)
  if ended or requests.is_final(fields.state) then
    requests.drop_holds(id, fields.tenant)
    return false
  end
  local event = bare_last_event(count, numbers.whole(fields.attempt, 0),
    numbers.whole(fields.prompt_tokens, 0), reason, error_type, message)
  fields.webhook = ending.wants_webhook(fields.payload)
  if fields.webhook then redis.pcall('HSET', keys.request(id), 'webhook', 1) end
  ending.finish(id, reason, numbers.exact(count), event, fields)
  return true
end
