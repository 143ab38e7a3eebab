-- Give held requests back, with their progress, at their old place in the queue.
-- KEYS  1 pending
-- ARGV  for each request: id, fence, prompt tokens ('' if unknown)
--       then, only if the worker's engine failed with them: max crashes (see reap); it counts as a
--         crash of each, at once
-- Reply a status for each: waiting, fenced (not held any more), finished, cancelled, dead

local HELD = 3
local max_crashes = #ARGV % HELD == 1 and tonumber(ARGV[#ARGV])
local statuses = {}
write_needs_no_memory()
for at = 1, #ARGV - HELD + 1, HELD do
  local id, fence, prompt_tokens = ARGV[at], ARGV[at + 1], ARGV[at + 2]
  local fields = read_request(id, 'fence', 'state', 'cancelled', 'score', 'tenant', 'priority') or {}
  local status = 'waiting'
  if is_final(fields.state) then
    status = 'finished'
  elseif fields.fence ~= fence then
    status = 'fenced'
  else
    if prompt_tokens ~= '' then tell_prompt_tokens(id, prompt_tokens, fields.tenant, fields.priority) end
    if fields.cancelled == '1' then
      finish_bare(id, 'cancelled')
      status = 'cancelled'
    elseif max_crashes then
      status = count_crash(id, fields.score, max_crashes)
    else
      back_to_waiting(id, fields.score, 'given back')
    end
  end
  statuses[#statuses + 1] = status
end
carry_out()
wake_workers()
return statuses
