-- Stands in front of every script: names, time, the request log, and the one way a request ends.
-- KEYS[1] is always the queue's `pending`; all other names are built on its prefix, which carries
-- the queue as hash tag, so that a script stays on one cluster shard.
-- Redis errors inside a script keep what came before and lose what comes after, so whatever a
-- stranger's key may have the wrong type for is reached with pcall.

local pending = KEYS[1]
local prefix = string.sub(pending, 1, -8)

-- Writes nothing, but fails where nothing can be written (out of memory, a full disk, a replica, too
-- few replicas). So a script fails as a whole before it has done anything; a pcall further on would
-- take such an error for a stranger's key.
redis.call('SETRANGE', prefix .. 'writable', 0, '')

local leases, deadlines = prefix .. 'leases', prefix .. 'deadlines'
local delayed, control, outputs = prefix .. 'delayed', prefix .. 'control', prefix .. 'outputs'

local STATE_AFTER = {
  stop = 'completed', length = 'completed', cancelled = 'cancelled', expired = 'expired',
  error = 'failed',
}
local IS_FINAL = {completed = true, failed = true, cancelled = true, expired = true, dead = true}
local MAX_OUTPUTS = 128 -- how many finished requests the measured p90 of output looks back on

local function request_key(id) return prefix .. 'request:' .. id end
local function tokens_key(id) return prefix .. 'tokens:' .. id end

-- Lua would print large numbers as 1.2e+15; keys and scores need every digit.
local function exact(number) return string.format('%.0f', number) end

local time = redis.call('TIME')
local now = tonumber(time[1]) * 1000 + math.floor(tonumber(time[2]) / 1000)
local now_text = exact(now)

-- A setting of the queue; each is read once a call at most.
local settings = {}
local function config(name, default)
  if settings[name] == nil then settings[name] = redis.call('HGET', prefix .. 'config', name) or false end
  return settings[name] or default
end

-- What a script does once for all its requests instead of once for each: members to be removed, by
-- their sorted set, and output lengths, newest last. Every script that ends requests carries it out.
local removals, finished_outputs = {}, {}

-- One command for many values. In pieces: Lua's stack takes some thousands at once.
local function call_for_all(command, key, values)
  for from = 1, #values, 1000 do
    redis.call(command, key, unpack(values, from, math.min(from + 999, #values)))
  end
end

local function remove_later(key, id)
  local ids = removals[key]
  if ids then ids[#ids + 1] = id else removals[key] = {id} end
end

local function carry_out()
  for key, ids in pairs(removals) do call_for_all('ZREM', key, ids) end
  if #finished_outputs > 0 then
    call_for_all('LPUSH', outputs, finished_outputs)
    redis.call('LTRIM', outputs, 0, MAX_OUTPUTS - 1)
  end
  removals, finished_outputs = {}, {}
end

-- A field as a whole number; the default where it is missing or a stranger wrote something else.
local function whole(value, default)
  if value and #value <= 15 and string.find(value, '^%-?%d+$') then return tonumber(value) end
  return default
end

-- A number of a payload that plain commands enqueued, which is known by its JSON alone. Bare quotes
-- cannot stand inside a JSON string, so a match is a key; at worst one of a nested object, and what
-- is read this way is only an estimate.
local function number_in(payload, name)
  return tonumber(string.match(payload, '"' .. name .. '"%s*:%s*(-?%d+)'))
end

local publish_command = config('pubsub') == 'sharded' and 'SPUBLISH' or 'PUBLISH'

local function publish_event(id, event)
  redis.call(publish_command, prefix .. 'events:' .. id, event)
end

-- Fields of a request's hash as a table; nil if the key is of another type.
local function read_request(id, ...)
  local values = redis.pcall('HMGET', request_key(id), ...)
  if values.err then return nil end
  local fields = {}
  for i = 1, #values do fields[select(i, ...)] = values[i] or nil end
  return fields
end

local function is_final(state)
  return IS_FINAL[state] or false
end

-- How many tokens the log holds, and whether its last event is there.
local function log_top(id)
  local top = redis.pcall('XREVRANGE', tokens_key(id), '+', '-', 'COUNT', 1)
  if top.err or #top == 0 then return 0, false end
  local count, is_last = string.match(top[1][1], '^(%d+)-(%d+)$')
  return tonumber(count), is_last == '1'
end

-- Every event of the log, oldest first, as JSON.
local function log_events(id)
  local entries = redis.pcall('XRANGE', tokens_key(id), '-', '+')
  local events = {}
  if entries.err then return events end
  for i, entry in ipairs(entries) do events[i] = entry[2][2] end
  return events
end

-- The whole log as one result. Built by hand where cjson would turn an empty array into {}.
local function fold_log(id)
  local texts, token_ids, logprobs, last = {}, {}, {}, {}
  for _, json in ipairs(log_events(id)) do
    local parsed, event = pcall(cjson.decode, json)
    if parsed and type(event) == 'table' and type(event.token_ids) == 'table' then
      last = event
      texts[#texts + 1] = last.text
      for _, token_id in ipairs(last.token_ids) do token_ids[#token_ids + 1] = exact(token_id) end
      if type(last.logprobs) == 'table' then
        for _, item in ipairs(last.logprobs) do logprobs[#logprobs + 1] = cjson.encode(item) end
      end
    end
  end
  local parts = {
    '"text":' .. cjson.encode(table.concat(texts)),
    '"token_ids":[' .. table.concat(token_ids, ',') .. ']',
    '"logprobs":' .. (#logprobs > 0 and '[' .. table.concat(logprobs, ',') .. ']' or 'null'),
  }
  for _, name in ipairs({'finish_reason', 'usage', 'stats', 'error'}) do
    if type(last[name]) == 'string' or type(last[name]) == 'table' then
      parts[#parts + 1] = cjson.encode(name) .. ':' .. cjson.encode(last[name])
    end
  end
  return '{' .. table.concat(parts, ',') .. '}'
end

-- A last event that no worker made: nothing but the reason, and the usage so far.
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

local HOLDS = {pending, leases, deadlines, delayed}
local function drop_holds(id)
  for i = 1, #HOLDS do remove_later(HOLDS[i], id) end
end

-- Append and publish the last event (`count`, as text, tokens come before its end), fold the log into the result, let go of every hold. `result`
-- is given by a worker that has it at hand; otherwise the log is read once more. So is the exact
-- length of the prompt, where the hash does not say it yet.
local function finish(id, reason, count, event, result, prompt_tokens)
  redis.pcall('XADD', tokens_key(id), count .. '-1', 'event', event)
  result = result or fold_log(id)
  redis.pcall('PEXPIRE', tokens_key(id), whole(config('log_ttl_ms'), 60000))
  publish_event(id, event)
  local key = request_key(id)
  if prompt_tokens then
    redis.pcall('HSET', key, 'state', STATE_AFTER[reason], 'finish_reason', reason,
      'finished_at', now_text, 'last_event', event, 'result', result, 'prompt_tokens', prompt_tokens)
  else
    redis.pcall('HSET', key, 'state', STATE_AFTER[reason], 'finish_reason', reason,
      'finished_at', now_text, 'last_event', event, 'result', result)
  end
  redis.pcall('PEXPIRE', key, whole(config('result_ttl_ms'), 3600000))
  drop_holds(id)
  if reason == 'stop' or reason == 'length' then
    finished_outputs[#finished_outputs + 1] = now_text .. ' ' .. count
  end
end

-- End a request without a worker: cancelled, expired, or an error.
local function finish_bare(id, reason, error_type, message)
  local fields = read_request(id, 'attempt', 'prompt_tokens') or {}
  local count, ended = log_top(id)
  if ended then return drop_holds(id) end
  local event = bare_last_event(count, whole(fields.attempt, 0),
    whole(fields.prompt_tokens, 0), reason, error_type, message)
  finish(id, reason, exact(count), event)
end

-- Ids whose deadline has passed, as a set.
local function past_deadline()
  local passed = {}
  for _, id in ipairs(redis.call('ZRANGE', deadlines, '-inf', now_text, 'BYSCORE',
    'LIMIT', 0, 1000)) do passed[id] = true end
  return passed
end

-- A place in the queue as it was kept; the end of the queue where a stranger spoilt it.
local function place(score)
  local number = tonumber(score or nil)
  if not number or number ~= number then number = now end
  return string.format('%.17g', number)
end

-- Move delayed requests whose time has come to pending. Returns how many.
local function promote_delayed()
  local due = redis.call('ZRANGE', delayed, '-inf', now_text, 'BYSCORE', 'LIMIT', 0, 100)
  for _, id in ipairs(due) do
    local fields = read_request(id, 'score') or {}
    redis.call('ZADD', pending, place(fields.score), id)
    redis.call('ZREM', delayed, id)
  end
  return #due
end

-- The queue score of a request that arrives now: lower runs first. Aging lets each level of
-- priority overtake by at most so long; a strict level is wider than any time.
local function score_of(priority)
  local level = config('strict_priority') == '1' and 2199023255552
    or whole(config('aging_ms'), 60000)
  return now + priority * level
end

-- Put a request that is not held (any more) in its old place.
local function back_to_waiting(id, score)
  redis.call('HSET', request_key(id), 'state', 'waiting')
  redis.call('HDEL', request_key(id), 'fence', 'worker')
  redis.call('ZREM', leases, id)
  redis.call('ZADD', pending, place(score), id)
end

local function wake_workers()
  redis.call('PUBLISH', control, 'pending')
end
