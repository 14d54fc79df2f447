use super::*;

fn templates(source: &str) -> ChatTemplates {
    named(&[(DEFAULT, source)])
}

fn named(sources: &[(&str, &str)]) -> ChatTemplates {
    let own = |pairs: &[(&str, &str)]| {
        pairs.iter().map(|&(name, text)| (name.to_owned(), text.to_owned())).collect()
    };
    ChatTemplates::new(own(sources), own(&[("bos_token", "<s>"), ("eos_token", "</s>")]))
}

/// Renders without messages.
fn render(source: &str) -> Result<String> {
    templates(source).render(&variables(&[], false, ""))
}

fn variables(messages: &[(&str, &str)], add_generation_prompt: bool, more: &str) -> Variables {
    let messages = messages.iter().map(|&(role, content)| Message {
        role: role.to_owned(),
        content: content.to_owned(),
        ids: Vec::new(),
    });
    Variables::new(messages.collect(), add_generation_prompt, more).unwrap()
}

#[test]
fn whitespace_and_special_tokens() {
    let chatml = templates(
        "{{ bos_token }}{% for m in messages %}\n  {% if m.role == 'user' %}\nQ: {{ m['content'] | trim }}\n  {% else %}\nA: {{ m.content }}{{ eos_token }}\n  {% endif %}\n{% endfor %}\n{%- if add_generation_prompt %}A:{% endif %}",
    );
    let messages = [("user", " hi "), ("assistant", "yo")];
    let render = |messages, more| chatml.render(&variables(messages, more, "")).unwrap();
    assert_eq!(render(&messages, false), "<s>Q: hi\nA: yo</s>\n");
    assert_eq!(render(&messages[..1], true), "<s>Q: hi\nA:");
}

#[test]
fn python_methods_namespaces_and_loop_controls() {
    let source = "{% set ns = namespace(n=0) %}{% for m in messages %}{% if m.content.startswith('skip') %}{% continue %}{% endif %}{% set ns.n = ns.n + 1 %}{{ m.content.split('|')[-1].strip().upper() }};{% endfor %}{{ ns.n }}{{ messages[::-1][0].role }}{{ messages[1:] | length }}";
    let messages = [("user", "a| b "), ("user", "skip"), ("tool", "c")];
    let made = templates(source).render(&variables(&messages, false, "")).unwrap();
    assert_eq!(made, "B;C;2tool2");
}

#[test]
fn absent_tools_and_undefined_names_are_false() {
    let source = "{% if tools %}T{% endif %}{% if not tools is defined %}U{% endif %}{% if tools is none %}N{% endif %}{% if tools is iterable %}I{% endif %}{% if enable_thinking is defined and enable_thinking is false %}X{% endif %}";
    assert_eq!(render(source).unwrap(), "N");
}

#[test]
fn generation_marks_render_as_nothing() {
    for source in [
        "a {%- generation -%} b {% endgeneration %} c",
        "a {%-generation-%} b {%  endgeneration  %} c",
    ] {
        assert_eq!(render(source).unwrap(), "ab  c");
    }
    assert_eq!(render("{{ '{% set x %}' }}{% set generation = 1 %}").unwrap(), "{% set x %}");
}

#[test]
fn percent_formats_texts_and_divides_numbers() {
    for (source, made) in [
        ("{{ '%s-%02d' % ('a', 7) }}", "a-07"),
        ("{{ ('%d' % 3) ~ 'x' }}", "3x"),
        ("{% set form = '%s%%' %}{{ form % 'a' }}", "a%"),
        ("{{ '%(a)s' % {'a': 1} }}", "1"),
        ("{{ 7 % 3 }} {{ -7 % 3 }} {{ 7 % -3 }} {{ 7.5 % 2 }} {{ 6 * 7 % 4 + 1 }}", "1 2 -2 1.5 3"),
        ("{{ 17 % 10 % 4 }}{% if loop is defined or (5 % 2) == 1 %}odd{% endif %}", "3odd"),
        ("{{ '50 %' }}{# a % b #}", "50 %"),
    ] {
        assert_eq!(render(source).unwrap(), made, "{source}");
    }
    assert!(render("{{ 1 % 0 }}").is_err());
}

#[test]
fn slices_with_a_step() {
    for (source, made) in [
        ("{{ [1, 2, 3][-1:-3:-1] }}{{ [1, 2, 3][::-1] }}{{ 'abc'[2::-2] }}", "[3, 2][3, 2, 1]ca"),
        ("{{ (1, 2, 3)[:1:-1] }}{{ [[1, 2], 3][0][::2] }}{{ 'abcd'[1:9:2] }}", "(3,)[1]bd"),
        ("{{ {'a': [1, 2][::-1][0], 'b': 2}['a'] }}{{ 'a:b'[1:] }}", "2:b"),
    ] {
        assert_eq!(render(source).unwrap(), made, "{source}");
    }
}

#[test]
fn loops_over_texts_and_none() {
    for (source, made) in [
        ("{% for c in 'ab' %}{{ c }}{{ loop.last }}{% endfor %}", "aFalsebTrue"),
        ("{% for a, b in {'k': 1}.items() if b in [1] %}{{ a }}{{ loop.length }}{% endfor %}", "k1"),
        ("{%- for x in [1, 2] | reverse -%} {{ x }} {%- endfor %}{% for x in no %}{% else %}E{% endfor %}", "21E"),
        ("{% for x in 1, 2 %}{{ x }}{% endfor %}", "12"),
    ] {
        assert_eq!(render(source).unwrap(), made, "{source}");
    }
    assert!(render("{% for x in none %}{% endfor %}").is_err());
}

#[test]
fn numbers_as_python_prints_them() {
    let source = "{{ 1e20 }} {{ 0.5 }} {{ 1e-7 | string }} {{ 'x' | int }} {{ '2.5' | float }} {{ no | length }}";
    assert_eq!(render(source).unwrap(), "1e+20 0.5 1e-07 0 2.5 0");
    let source = "{{ {'a': [1e20, (1,), (), none], 'b': \"it's\"} }}{{ [(2, 'x')] | string }}";
    assert_eq!(render(source).unwrap(), r#"{'a': [1e+20, (1,), (), None], 'b': "it's"}[(2, 'x')]"#);
}

#[test]
fn named_templates() {
    let several = named(&[("default", "D"), ("tool_use", "T"), ("rag", "R")]);
    let render = |more| several.render(&variables(&[], false, more)).unwrap();
    assert_eq!(render(""), "D");
    assert_eq!(render(r#"{"tools": null}"#), "D");
    assert_eq!(render(r#"{"tools": []}"#), "T");
    let none = named(&[("rag", "R"), ("tool_use", "T")]).render(&variables(&[], false, ""));
    let refusal = none.unwrap_err().to_string();
    assert!(refusal.contains("rag, tool_use"), "{refusal}");
}

#[test]
fn variables_of_every_kind() {
    let more = r#"{"messages": [{"role": "tool", "content": null, "z": 1, "a": [true, 1.5]}], "who": "me"}"#;
    let source = "{{ messages[0] | tojson }}{{ 'content' in messages[0] }}{{ who }}";
    assert_eq!(
        templates(source).render(&variables(&[("user", "x")], false, more)).unwrap(),
        r#"{"role": "tool", "z": 1, "a": [true, 1.5]}Falseme"#
    );
    for wrong in ["[1]", "{", "3"] {
        let refusal = Variables::new(Vec::new(), false, wrong).err().unwrap().to_string();
        assert!(refusal.contains("expected a JSON object"), "{refusal}");
    }
}

#[test]
fn a_template_can_refuse() {
    let refusal = render("\n{{ raise_exception('roles must alternate') }}").unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "the chat template cannot render this conversation: roles must alternate (line 2 of the template)"
    );
}

#[test]
fn a_broken_template_is_an_error() {
    assert!(render("{% for m in %}").is_err());
    assert!(render("{{ 'a' % }}").is_err());
}

#[test]
fn an_endless_template_is_an_error() {
    let nested =
        "{% for a in range(9999) %}{% for b in range(9999) %}{{ a }}{% endfor %}{% endfor %}";
    let refusal = render(nested).unwrap_err().to_string();
    assert!(refusal.contains("instructions"), "{refusal}");
}

#[test]
fn values_within_a_template_are_bounded() {
    let grown = |value: &str, by: &str| {
        format!("{{% set ns = namespace(a={value}) %}}{{% for i in range(60) %}}{{% set ns.a = {by} %}}{{% endfor %}}")
    };
    for (source, why) in [
        (grown("'x'", "ns.a ~ ns.a"), "makes a text of"),
        (grown("'x'", "ns.a + ns.a"), "makes a text of"),
        (grown("'x'", "ns.a | replace('x', 'xx')"), "makes a text of"),
        (grown("[1]", "ns.a + ns.a"), "reads and writes"),
        (grown("[1]", "[ns.a, ns.a]") + "{{ ns.a }}", "makes a text of"),
        (grown("[1]", "[ns.a, ns.a]") + "{{ {ns.a: 1} }}", "reads and writes"),
        (grown("[1]", "[ns.a, ns.a]") + "{{ ns.a | upper }}", "reads and writes"),
        (grown("1", "[[[ns.a]]]") + "{{ ns.a }}", "nested more than 100 levels"),
        ("{{ [1] | batch(10 ** 14, 0) | list }}".to_owned(), "reads and writes"),
        ("{{ 'a\nb' | indent(10 ** 14) }}".to_owned(), "makes a text of"),
        ("{{ '%*d' % (10 ** 14, 1) }}".to_owned(), "makes a text of"),
        ("{{ '{:99999999999}'.format(1) }}".to_owned(), "makes a text of"),
        ("{{ 'a' * 99999999 }}".to_owned(), "makes a text of"),
        ("{% set ns = namespace() %}{% set ns.a = [ns] %}".to_owned(), "namespace"),
        (format!("{{{{ x{} }}}}", "+1".repeat(9999)), "more than 4096 words and signs"),
        ("x".repeat(300_000), "the maximum is 262144"),
    ] {
        let refusal = render(&source).unwrap_err().to_string();
        assert!(refusal.contains(why), "{source}: {refusal}");
    }
}

#[test]
fn checks_change_no_answer() {
    let source = "{% for m, n in {'a': 2, 'b': 3}.items() recursive %}{{ m * n ~ '-' }}{% endfor %}\
        {% set x %}{{ 'a' if 1 in [1] else 'b' }}{% endset %}{{ x | replace('a', 'c') | upper }}\
        {% macro f(a, b=2, c=[]) %}{{ a }}{{ b }}{{ c | length }}{{ caller() if caller }}{% endmacro %}\
        {{ f(*[1], **{'b': 5}) }}{% call f(1, c=(1, 2)) %}!{% endcall %}\
        {{ [1, 2] | map('string') | join(', ') }}{{ '%s' % ((1, 2) | length) }}{{ 1 < 2 <= 2 }}{{ 'ab'[-1:] }}";
    assert_eq!(render(source).unwrap(), "aa-bbb-C150122!1, 22Trueb");
}

#[test]
fn the_date() {
    let year = render("{{ strftime_now('%Y') }}").unwrap();
    assert!(year.parse::<i32>().unwrap() > 2000, "{year}");
}
