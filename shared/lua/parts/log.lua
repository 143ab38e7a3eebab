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
