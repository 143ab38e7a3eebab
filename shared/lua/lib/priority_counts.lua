-- uses: keys, numbers, requests, pending
-- How many requests wait at each priority, over all tenants. Few requests are counted exactly. Of many, a
-- call looks at the fronts of the queues and an even sample of the rest, so that its work is bounded.

local MAX_LOOKED_AT = 1000
local MAX_SEARCHED_PAYLOAD = 65536 -- bytes; a longer payload of plain commands counts as priority 0

local function priority_of_waiting(id)
  local fields = requests.read(id, 'priority') or {}
  local priority = numbers.whole(fields.priority)
  if priority then return priority end
  local key = keys.request(id)
  local length = redis.pcall('HSTRLEN', key, 'payload')
  if type(length) ~= 'number' or length == 0 or length > MAX_SEARCHED_PAYLOAD then return 0 end
  return numbers.in_json(redis.call('HGET', key, 'payload'), 'priority') or 0
end

-- Returns how many wait, and {[priority] = how many}.
function priority_counts.count()
  local queues, total, counts = pending.queues(), 0, {}
  local quota = math.max(2, math.floor(MAX_LOOKED_AT / #queues))
  local function count(key, from, to, weight)
    for _, id in ipairs(redis.call('ZRANGE', key, from, to)) do
      local priority = priority_of_waiting(id)
      counts[priority] = (counts[priority] or 0) + weight
    end
  end
  for _, key in ipairs(queues) do
    local num = redis.call('ZCARD', key)
    total = total + num
    if num <= quota then
      count(key, 0, -1, 1)
    else
      local front = math.floor(quota / 2)
      local stride = (num - front) / (quota - front)
      count(key, 0, front - 1, 1)
      for nth = 0, quota - front - 1 do
        local at = front + math.floor(nth * stride)
        count(key, at, at, stride)
      end
    end
  end
  for priority, num in pairs(counts) do counts[priority] = math.floor(num + 0.5) end
  return total, counts
end
