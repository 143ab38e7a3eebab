-- uses: keys, numbers, server, pictures
-- A request's hash and log, estimates of its tokens, and how it is deleted.

local IS_FINAL = {completed = true, failed = true, cancelled = true, expired = true, dead = true}
local HOLDS = {keys.leases, keys.deadlines, keys.delayed}
requests.DEFAULT_OUTPUT = 256 -- expected output while no request has finished yet

function requests.is_final(state) return IS_FINAL[state] or false end

-- Why a request may not have this id, or nil if it may.
function requests.wrong_id(id)
  if #id > 0 and #id <= 200 and not string.find(id, '[^\33-\126]') then return nil end
  return 'id: is not 1 to 200 printable ASCII characters without spaces'
end

-- Fields of a request's hash as a table; nil if the key is of another type.
function requests.read(id, ...)
  local names, fields = {...}, redis.pcall('HMGET', keys.request(id), ...)
  if fields.err then return nil end
  for i = 1, #names do fields[names[i]] = fields[i] or nil end
  return fields
end

-- How many tokens the log has, and whether it has its last event.
function requests.log_top(id)
  local top = redis.pcall('XREVRANGE', keys.tokens(id), '+', '-', 'COUNT', 1)
  if top.err or #top == 0 then return 0, false end
  local count, is_last = string.match(top[1][1], '^(%d+)-(%d+)$')
  return tonumber(count), is_last == '1'
end

-- Every event of the log, oldest first, as JSON.
function requests.log_events(id)
  local entries, events = redis.pcall('XRANGE', keys.tokens(id), '-', '+'), {}
  for i, entry in ipairs(entries.err and {} or entries) do events[i] = entry[2][2] end
  return events
end

local publish_command = server.config('pubsub') == 'sharded' and 'SPUBLISH' or 'PUBLISH'

function requests.publish_event(id, event) redis.call(publish_command, keys.events(id), event) end

-- Whether a request's deadline has passed. Usually none has, so each call first checks once whether any has.
local some_have_passed
function requests.is_past_deadline(id)
  if some_have_passed == nil then some_have_passed = #server.due(keys.deadlines, server.now_text, 1) > 0 end
  local deadline = some_have_passed and server.score_in(keys.deadlines, id)
  return deadline and deadline <= server.now
end

local PICTURE_BYTES = 4096

-- Tokens of a prompt, estimated from the length of the payload until a tokenizer has seen it. A picture counts as
-- if its data URL, or its name, had PICTURE_BYTES.
function requests.estimated_prompt(payload)
  local length = #payload
  for _, beginning in ipairs({'"data:image/', '"sha256:'}) do
    local start = string.find(payload, beginning, 1, true)
    while start do
      local stop = string.find(payload, '"', start + 1, true) or #payload
      local is_picture = beginning ~= '"sha256:' or pictures.end_of_name(payload, start) == stop + 1
      if is_picture and string.byte(payload, start - 1) ~= 92 then -- a backslash: inside a text
        length = length - (stop - start) + PICTURE_BYTES
      end
      start = string.find(payload, beginning, stop, true)
    end
  end
  return math.ceil(length / 4)
end

-- The payload's max_tokens, found as in `numbers.in_json`: 0 if the request generates nothing, nil if not set.
function requests.requested_output(payload)
  if string.find(payload, '"embed":', 1, true) or string.find(payload, '"tokenize":true', 1, true) then return 0 end
  return numbers.in_json(payload, 'max_tokens')
end

-- The number of tokens that a waiting request counts as.
function requests.estimated_tokens(payload)
  local max_tokens = requests.requested_output(payload) or requests.DEFAULT_OUTPUT
  return requests.estimated_prompt(payload) + math.max(0, math.min(max_tokens, 2147483648))
end

-- Remove a request from its queue, and from the lists of leases, deadlines and delays.
function requests.drop_holds(id, tenant)
  server.remove_later(keys.pending_of(tenant), id)
  server.remove_later(keys.running_of(tenant), id)
  for i = 1, #HOLDS do server.remove_later(HOLDS[i], id) end
end

-- Delete a dead letter and all that is kept of it. Returns false if the id is not a dead letter.
function requests.purge(id)
  if redis.call('ZREM', keys.dead, id) == 0 then return false end
  local fields = requests.read(id, 'tenant', 'pictures') or {}
  requests.drop_holds(id, fields.tenant) -- a stranger may have put it into a queue again
  pictures.let_go(id, fields.pictures, 0)
  redis.call('DEL', keys.request(id), keys.tokens(id))
  return true
end
