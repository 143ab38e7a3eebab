-- What waits at each priority, over all tenants; changes nothing.
-- KEYS  1 pending
-- Reply {how many wait, priority, how many, priority, how many, ...}; of more than some hundreds the
--       numbers at the single priorities are estimates

local total, counts = waiting_by_priority()
local reply = {total}
for priority, num in pairs(counts) do
  reply[#reply + 1] = priority
  reply[#reply + 1] = num
end
return reply
