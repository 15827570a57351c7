"""The text of answers as content, reasoning and tool calls; grammars that bind tool calls.

    chat template -> ToolFormat (hermes, qwen-xml, llama, mistral, harmony), ReasoningFormat
    text in pieces -> AnswerParser -> AnswerPart -> ParsedMessage
    tools, tool choice -> ToolFormat.grammar -> Grammar

Nothing here knows tokens, requests or HTTP.
"""
