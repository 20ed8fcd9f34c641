use super::*;
use crate::tokenizer::tests::folder;

/// Turns between header tokens, content trimmed, date from the clock.
const LLAMA: &str = r#"{{- bos_token }}
{%- if not date_string is defined %}
    {%- if strftime_now is defined %}
        {%- set date_string = strftime_now("%d %b %Y") %}
    {%- else %}
        {%- set date_string = "26 Jul 2024" %}
    {%- endif %}
{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system_message = messages[0]['content']|trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system_message = "" %}
{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\n" }}
{{- "Today Date: " + date_string + "\n\n" }}
{{- system_message }}
{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or 'tool_calls' in message) %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}
"#;

/// A default system message, tools as JSON lines.
const QWEN: &str = r#"{%- if tools %}
    {{- '<|im_start|>system\n' }}
    {%- for tool in tools %}
        {{- "\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- "<|im_end|>\n" }}
{%- else %}
    {%- if messages[0]['role'] == 'system' %}
        {{- '<|im_start|>system\n' + messages[0]['content'] + '<|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>system\nYou help.<|im_end|>\n' }}
    {%- endif %}
{%- endif %}
{%- for message in messages %}
    {%- if (message.role == "user") or (message.role == "system" and not loop.first) or (message.role == "assistant" and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' + '\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}
{%- endif %}
"#;

/// Everything in expressions, on few lines.
const SMOLLM2: &str = "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system
You help.<|im_end|>
' }}{% endif %}{{'<|im_start|>' + message['role'] + '
' + message['content'] + '<|im_end|>' + '
'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant
' }}{% endif %}";

fn render(source: &str, messages: &[Value], open: bool) -> String {
    let mut template = ChatTemplate::new(source).unwrap();
    template.set_time(1_721_952_000);
    let variables = json!({"bos_token": "<|begin_of_text|>"});
    template = template.with_variables(variables.as_object().unwrap().clone());
    template.render(messages, open).unwrap()
}

#[test]
fn llama_with_and_without_system_message() {
    assert_eq!(
        render(LLAMA, &[message("user", " 1+1? ")], true),
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\n<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\n1+1?<|eot_id|>\
         <|start_header_id|>assistant<|end_header_id|>\n\n"
    );
    assert_eq!(
        render(
            LLAMA,
            &[message("system", "Be brief."), message("user", "Hi")],
            false
        ),
        "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\nToday Date: 26 Jul 2024\n\nBe brief.<|eot_id|>\
         <|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    );
}

#[test]
fn qwen_with_tools_and_conversation() {
    let talk = [
        message("user", "Hi"),
        message("assistant", "Hello"),
        message("system", "Now calculate."),
        message("user", "1<2?"),
    ];
    assert_eq!(
        render(QWEN, &talk, true),
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nHello<|im_end|>\n\
         <|im_start|>system\nNow calculate.<|im_end|>\n<|im_start|>user\n1<2?<|im_end|>\n<|im_start|>assistant\n"
    );
    let tools = json!({"tools": [{"name": "add", "about": "a & 'b' <é>", "args": [1, 2.0, true, null], "none": {}}]});
    let template = ChatTemplate::new(QWEN)
        .unwrap()
        .with_variables(tools.as_object().unwrap().clone());
    assert_eq!(
        template.render(&talk[..1], false).unwrap(),
        "<|im_start|>system\n\n{\"name\": \"add\", \"about\": \"a & 'b' <é>\", \"args\": [1, 2.0, true, null], \"none\": {}}\
         <|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    );
}

#[test]
fn smollm2_adds_its_system_message() {
    assert_eq!(
        render(SMOLLM2, &[message("user", "2+3")], true),
        "<|im_start|>system\nYou help.<|im_end|>\n<|im_start|>user\n2+3<|im_end|>\n<|im_start|>assistant\n"
    );
}

#[test]
fn values_and_methods_behave_like_python() {
    let one = |source: &str| render(source, &[message("user", " a,b ")], true);
    assert_eq!(one("{{ messages[0].content.strip().split(',')[1] }}"), "b");
    assert_eq!(
        one("{{ true }} {{ none }} {{ nothing }}|{{ tools }}"),
        "True None |None"
    );
    assert_eq!(
        one("{{ {'b': [], 'a': [1]} | tojson(indent=2, sort_keys=true) }}"),
        "{\n  \"a\": [\n    1\n  ],\n  \"b\": []\n}"
    );
    assert_eq!(
        one("{{ [1, {'a': 2}] | tojson(separators=(',', ':')) }}"),
        "[1,{\"a\":2}]"
    );
    assert_eq!(
        one(
            "{% set ns = namespace(n=0) %}\n  {% for i in [1, 2, 3] %}\n    {% if i == 2 %}{% continue %}{% endif %}\n    {% set ns.n = ns.n + i %}\n  {% endfor %}\n{{ ns.n }}\n"
        ),
        "4"
    );
    assert_eq!(
        one(
            "{% for m in messages %}[{%- generation -%} {{ m.content }} {%- endgeneration %}\n]{% endfor %}"
        ),
        "[ a,b ]"
    );
}

#[test]
fn errors_contain_the_templates_reason() {
    let template = ChatTemplate::new(
        "{% if messages[0].role != 'user' %}{{ raise_exception('roles must begin with user') }}{% endif %}",
    )
    .unwrap();
    assert_eq!(
        template
            .render(&[message("tool", "")], false)
            .unwrap_err()
            .to_string(),
        "the chat template refuses the messages: roles must begin with user"
    );
    let error = ChatTemplate::new("{% for m in %}").unwrap_err();
    assert!(matches!(error, ChatTemplateError::Syntax { .. }));
    assert!(error.to_string().contains(":1)"), "{error}");
    let error = ChatTemplate::new("{{ messages[0].a.b }}")
        .unwrap()
        .render(&[message("user", "")], false)
        .unwrap_err();
    assert!(error.to_string().contains("undefined"), "{error}");
}

#[test]
fn templates_are_found_in_three_places() {
    let load = |files: &[(&str, Value)]| {
        let dir = folder(files);
        ChatTemplate::load(dir.path()).map(|t| t.render(&[message("user", "x")], true).unwrap())
    };
    let text = json!({"chat_template": "{{ bos_token }}text", "bos_token": {"content": "<s>"}});
    assert_eq!(
        load(&[("tokenizer_config.json", text.clone())]).unwrap(),
        "<s>text"
    );
    let list = json!({"chat_template": [
        {"name": "tool_use", "template": "tools"}, {"name": "default", "template": "listed"}
    ]});
    assert_eq!(load(&[("tokenizer_config.json", list)]).unwrap(), "listed");

    let dir = folder(&[("tokenizer_config.json", text)]);
    std::fs::write(
        dir.path().join("chat_template.jinja"),
        "{{ bos_token }}file\n",
    )
    .unwrap();
    let template = ChatTemplate::load(dir.path()).unwrap();
    assert_eq!(template.render(&[], true).unwrap(), "<s>file");

    assert!(matches!(load(&[]), Err(ChatTemplateError::Missing { .. })));
    let error = load(&[(
        "tokenizer_config.json",
        json!({"chat_template": [{"name": "rag", "template": ""}]}),
    )]);
    assert!(
        error
            .unwrap_err()
            .to_string()
            .contains("has the chat templates rag,")
    );
}

#[test]
fn the_terminator_is_known_if_generation_stops_at_it() {
    let of = |source: &str, eos: Value| {
        let dir = folder(&[("generation_config.json", json!({"eos_token_id": eos}))]);
        let tokenizer = Tokenizer::load(dir.path()).unwrap();
        ChatTemplate::new(source)
            .unwrap()
            .terminator(&tokenizer)
            .unwrap()
    };
    let source = "{% for m in messages %}{{ m.content }} <end>\n{% endfor %}";
    assert_eq!(of(source, json!([2, 6])), Some(6));
    assert_eq!(of(source, json!(2)), None);
    assert_eq!(of("{{ raise_exception('no') }}", json!(2)), None);
}
