-- uses: keys, numbers, server, requests
-- Fields of requests that some engines cannot serve. Each worker reports those of its engine, separated by spaces, as
-- `refused`. A request's field `needs` lists those of its fields that a worker had to refuse.

local function has_one_of(list, needs)
  for field in string.gmatch(needs, '%S+') do
    if string.find(' ' .. list .. ' ', ' ' .. field .. ' ', 1, true) then return true end
  end
  return false
end

-- Whether a live worker serves all fields of the list `needs`. Workers of earlier releases report no list. A
-- worker on standby has promptq's own engine, which scores nothing and sees no pictures; not every model embeds.
local lists, answers = nil, {}
local function some_worker_serves(needs)
  if not lists then
    lists = {}
    local ids = redis.pcall('ZRANGE', keys.prefix .. 'workers', server.now_text, '+inf', 'BYSCORE')
    for _, id in ipairs(ids.err and {} or ids) do
      local record = redis.pcall('HMGET', keys.prefix .. 'worker:' .. id, 'heartbeat_at', 'refused')
      if record[1] then lists[#lists + 1] = record[2] or '' end
    end
    local standby_until = redis.pcall('HGET', keys.prefix .. 'model', 'standby_until')
    if type(standby_until) == 'string' and numbers.whole(standby_until, 0) > server.now then
      lists[#lists + 1] = 'embed pictures scores'
    end
  end
  if answers[needs] == nil then
    answers[needs] = false
    for _, list in ipairs(lists) do
      answers[needs] = answers[needs] or not has_one_of(list, needs)
    end
  end
  return answers[needs]
end

-- Whether a worker that refuses these fields leaves a request with these `needs` to another live worker.
function abilities.is_for_others(needs, refused)
  return has_one_of(refused, needs) and some_worker_serves(needs)
end

-- Note that a request needs a field. Returns whether a live worker serves the request.
function abilities.note_need(id, field)
  local needs = (requests.read(id, 'needs') or {}).needs
  if not needs then
    needs = field
  elseif not has_one_of(needs, field) then
    needs = needs .. ' ' .. field
  end
  redis.call('HSET', keys.request(id), 'needs', needs)
  return some_worker_serves(needs)
end
