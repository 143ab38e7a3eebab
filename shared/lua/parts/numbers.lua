-- Numbers as keys, fields and payloads hold them: text.

-- Lua would print large numbers as 1.2e+15; keys and scores need every digit.
function numbers.exact(number) return string.format('%.0f', number) end

-- With its fraction.
function numbers.precise(number) return string.format('%.17g', number) end

-- A field as a whole number; the default where it is missing or a stranger wrote something else.
function numbers.whole(value, default)
  if value and #value <= 15 and string.find(value, '^%-?%d+$') then return tonumber(value) end
  return default
end

-- A number of a payload that plain commands enqueued, which is known by its JSON alone. Bare quotes
-- cannot stand inside a JSON string, so a match is a key; at worst one of a nested object, and what
-- is read this way is only an estimate.
function numbers.in_json(payload, name)
  return tonumber(string.match(payload, '"' .. name .. '"%s*:%s*(-?%d+)'))
end
