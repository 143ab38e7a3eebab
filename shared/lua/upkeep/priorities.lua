-- uses: priority_counts
-- What waits at each priority, over all tenants; changes nothing.
-- Reply {how many wait, priority, how many, priority, how many, ...}; of more than some hundreds the
--       numbers at the single priorities are estimates

local total, counts = priority_counts.count()
local reply = {total}
for priority, num in pairs(counts) do
  reply[#reply + 1] = priority
  reply[#reply + 1] = num
end
return reply
