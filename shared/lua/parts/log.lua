-- A request's log, and the result that it is folded into.

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

-- Whether a decoded entry of a log is an event as workers write it: anybody who may write to the server
-- may have put something else there.
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

-- JSON of a decoded value; nil of what JSON cannot say, as a number that was too large for one.
local function encoded(value)
  local worked, text = pcall(cjson.encode, value)
  return worked and text or nil
end

-- The log and the last event as one result; entries that are no events are left out. Built by hand where
-- cjson would turn an empty array into {}.
local function fold_log(id, last_event)
  local texts, token_ids, logprobs, last = {}, {}, {}, {}
  local events = log_events(id)
  events[#events + 1] = last_event
  for _, json in ipairs(events) do
    local parsed, event = pcall(cjson.decode, json)
    if parsed and is_event(event) then
      last = event
      texts[#texts + 1] = event.text
      for _, token_id in ipairs(event.token_ids) do token_ids[#token_ids + 1] = exact(token_id) end
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
