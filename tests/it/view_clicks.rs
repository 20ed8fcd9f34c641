//! `pipe debug view` in a browser with clicks: selections are shown, and texts are readable in dark mode.

use std::fs;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::browser::Browser;
use crate::debug::pipe_debug;
use crate::kit::Place;

/// The page of a run with everything on it: anomalies, steps in full, texts.
fn page(place: &Place) -> PathBuf {
    let run = place.train(
        "run",
        &[
            "trace.every=1",
            "evaluate.every=1",
            "trace.rules.advantage_variance.limit=1e-9",
            "trace.rules.grad_norm_spike.limit=1e-9",
        ],
    );
    let (code, text) = pipe_debug(&format!("view --run {}", run.dir.display()));
    assert_eq!(code, 0, "{text}");
    run.dir.join("view.html")
}

/// The result of `script` on the page after it is drawn. The page's policy blocks foreign scripts, so the test uses a
/// copy without the policy.
#[track_caller]
fn asked(browser: &Browser, page: &Path, script: &str) -> Value {
    let html = fs::read_to_string(page).expect("a page");
    let (before, rest) = html
        .split_once("<meta http-equiv=\"Content-Security-Policy\"")
        .expect("a policy");
    let (_, after) = rest.split_once('>').expect("its end");
    let (body, end) = after.rsplit_once("</body>").expect("a body");
    let asking = format!(
        "<pre id=\"answer\" hidden></pre><script>\
         {{ const say = (value) => {{ document.getElementById(\"answer\").textContent = JSON.stringify(value); }};\
         const click = (node) => node.dispatchEvent(new MouseEvent(\"click\", {{ bubbles: true }}));\
         say((() => {{ {script} }})()); }}</script>"
    );
    let copy = page.with_file_name("asked.html");
    fs::write(&copy, format!("{before}{body}{asking}</body>{end}")).expect("a file");
    let document = browser.document(&copy);
    let (_, answer) = document
        .split_once("<pre id=\"answer\" hidden=\"\">")
        .expect("an answer");
    let (answer, _) = answer.split_once("</pre>").expect("its end");
    let answer = answer
        .replace("&lt;", "<")
        .replace("&gt;", ">")
        .replace("&amp;", "&");
    serde_json::from_str(&answer).unwrap_or_else(|_| panic!("no JSON: {answer}"))
}

#[test]
fn what_is_clicked_is_shown() {
    let Some(browser) = Browser::find() else {
        return;
    };
    let place = Place::new();
    let page = page(&place);
    let seen = asked(
        &browser,
        &page,
        r##"
        const title = () => document.querySelector("#sample .sample-title").textContent;
        const tokens = () => document.getElementById("response-tokens").textContent;
        const groups = () => [...document.querySelectorAll("#curve-grid .card")].map((card) => card.querySelector(".name").textContent);
        const node = (name) => [...document.querySelectorAll("#graph .node")].find((node) => node.querySelector(".name").textContent === name);
        const list = document.getElementById("sample-list");
        const seen = { options: list.options.length, samples: [] };
        for (const at of [0, 5, 15]) {
          list.selectedIndex = at;
          list.dispatchEvent(new Event("change", { bubbles: true }));
          seen.samples.push({ option: list.options[at].textContent, title: title(), tokens: tokens() });
        }
        seen.stages = {};
        for (const name of ["reward", "advantages", "generate"]) {
          click(node(name));
          seen.stages[name] = { chosen: document.getElementById("curve-stage").value, count: document.getElementById("curve-count").textContent, names: groups() };
        }
        const edge = document.querySelector("#graph .edge:not(.waits)");
        click(edge);
        seen.edge = { label: edge.getAttribute("aria-label"), chosen: document.getElementById("curve-stage").value, shown: groups().length };
        const row = [...document.querySelectorAll("#anomaly-list tr.link")].pop();
        click(row);
        seen.anomaly = { step: row.dataset.step, chosen: document.getElementById("step-choice").value, marked: row.classList.contains("chosen") };
        document.getElementById("step-choice").value = "1";
        document.getElementById("step-choice").dispatchEvent(new Event("change"));
        const first = document.getElementById("step-table").textContent;
        click(document.getElementById("step-on"));
        seen.step = { number: document.getElementById("step-choice").value, differs: first !== document.getElementById("step-table").textContent, sampled: document.getElementById("sample-step").value };
        const span = [...document.querySelectorAll("#response-tokens span")].pop();
        span.dispatchEvent(new MouseEvent("mouseover", { bubbles: true }));
        seen.token = { detail: document.getElementById("token-detail").textContent, here: span.classList.contains("here"), count: document.querySelectorAll("#response-tokens span").length };
        seen.errors = document.documentElement.dataset.errors ?? null;
        return seen;
        "##,
    );
    assert_eq!(seen["errors"], Value::Null);
    assert_eq!(seen["options"], 16);
    let samples = seen["samples"].as_array().expect("samples");
    let mut titles = Vec::new();
    for sample in samples {
        let (title, option) = (sample["title"].as_str(), sample["option"].as_str());
        let (title, option) = title.zip(option).expect("texts");
        // The list shows `epoch.row#sample`, after a mark if a rule reported the sample; the title shows the same.
        let id = option
            .trim_start_matches("▲ ")
            .split(" · ")
            .next()
            .expect("an id");
        assert!(
            title.contains(&format!("Sample {id} of step")),
            "{title}: {option}"
        );
        assert!(
            sample["tokens"]
                .as_str()
                .is_some_and(|tokens| !tokens.is_empty())
        );
        titles.push(title);
    }
    titles.dedup();
    assert_eq!(titles.len(), 3, "{titles:?}");
    for stage in ["reward", "advantages", "generate"] {
        let shown = &seen["stages"][stage];
        assert_eq!(shown["chosen"], stage);
        let names = shown["names"].as_array().expect("curves");
        let count = format!("{} of ", names.len());
        assert!(
            !names.is_empty()
                && shown["count"]
                    .as_str()
                    .is_some_and(|label| label.starts_with(&count)),
            "{shown}"
        );
    }
    let names = |stage: &str| seen["stages"][stage]["names"].to_string();
    assert!(names("reward").contains("rewards"), "{}", names("reward"));
    assert_ne!(names("reward"), names("generate"));
    let (label, chosen) = (&seen["edge"]["label"], &seen["edge"]["chosen"]);
    let from = label.as_str().and_then(|label| label.split(" to ").next());
    assert_eq!(chosen.as_str(), from, "{seen}");
    assert!(
        seen["edge"]["shown"]
            .as_u64()
            .is_some_and(|shown| shown > 0)
    );
    assert_eq!(seen["anomaly"]["step"], seen["anomaly"]["chosen"]);
    assert_eq!(seen["anomaly"]["marked"], true);
    assert_eq!(seen["step"]["number"], "2");
    assert_eq!(seen["step"]["differs"], true);
    assert_eq!(seen["step"]["sampled"], "2");
    assert_eq!(seen["token"]["here"], true);
    let detail = seen["token"]["detail"].as_str().expect("a text");
    assert!(
        detail.starts_with(&format!("token {} ", seen["token"]["count"])),
        "{detail}"
    );
}

/// Contrast that WCAG 2.2 requires for texts (success criterion 1.4.3).
const CONTRAST: f64 = 4.5;

/// The text with the least contrast to its background, for each kind of element, by relative luminance.
const CONTRASTS: &str = r##"
    const paint = document.createElement("canvas").getContext("2d", { willReadFrequently: true });
    const rgba = (colour) => {
      paint.clearRect(0, 0, 1, 1);
      paint.fillStyle = colour;
      paint.fillRect(0, 0, 1, 1);
      const [r, g, b, a] = paint.getImageData(0, 0, 1, 1).data;
      return [r, g, b, a / 255];
    };
    const over = (top, below) => top.slice(0, 3).map((c, at) => c * top[3] + below[at] * (1 - top[3]));
    const behind = (node) => {
      if (!node) return [255, 255, 255];
      const style = getComputedStyle(node);
      return over(rgba(style.backgroundColor), behind(node.parentElement));
    };
    const light = (colour) => {
      const [r, g, b] = colour.map((c) => c / 255).map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
      return 0.2126 * r + 0.7152 * g + 0.0722 * b;
    };
    const least = {};
    let count = 0;
    const look = (node, colouring) => {
      const own = [...node.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim());
      const box = node.getBoundingClientRect();
      if (!own || !box.width || ["SCRIPT", "STYLE", "NOSCRIPT", "TITLE"].includes(node.tagName) || node.id === "answer") return;
      const style = getComputedStyle(node);
      const inGraph = node.ownerSVGElement;
      let back = behind(inGraph ? inGraph.parentElement : node);
      const rect = inGraph && node.parentElement.querySelector("rect");
      if (rect) back = over(rgba(getComputedStyle(rect).fill), back);
      const ink = rgba(inGraph ? style.fill : style.color);
      ink[3] *= Number(style.opacity);
      const [a, b] = [light(over(ink, back)), light(back)].sort((x, y) => y - x);
      const ratio = (a + 0.05) / (b + 0.05);
      const kind = `${node.tagName.toLowerCase()}.${node.getAttribute("class") || ""} in ${node.closest("[id]")?.id || ""}${colouring ? `, coloured by ${colouring}` : ""}`;
      count += 1;
      if (!(kind in least) || least[kind] > ratio) least[kind] = Number(ratio.toFixed(2));
    };
    document.querySelectorAll("body *").forEach((node) => look(node));
    const colours = document.getElementById("sample-colour");
    for (const option of colours.options) {
      colours.value = option.value;
      colours.dispatchEvent(new Event("change"));
      document.querySelectorAll("#response-tokens span").forEach((node) => look(node, option.value));
    }
    const back = behind(document.body);
    return { dark: matchMedia("(prefers-color-scheme: dark)").matches, back: light(back), least, count, errors: document.documentElement.dataset.errors ?? null };
"##;

#[test]
fn texts_can_be_read_in_the_dark_and_in_the_light() {
    let Some(browser) = Browser::find() else {
        return;
    };
    let place = Place::new();
    let page = page(&place);
    for dark in [false, true] {
        let browser = match dark {
            true => browser.dark(),
            false => browser.light(),
        };
        let seen = asked(&browser, &page, CONTRASTS);
        assert_eq!(seen["errors"], Value::Null);
        assert_eq!(seen["dark"], dark);
        let back = seen["back"].as_f64().expect("a luminance");
        assert!(if dark { back < 0.05 } else { back > 0.8 }, "{back}");
        assert!(
            seen["count"].as_u64().is_some_and(|count| count > 300),
            "{}",
            seen["count"]
        );
        let least = seen["least"].as_object().expect("kinds");
        let faint: Vec<String> = least
            .iter()
            .filter(|(_, ratio)| ratio.as_f64().is_none_or(|ratio| ratio < CONTRAST))
            .map(|(kind, ratio)| format!("{kind}: {ratio}"))
            .collect();
        assert!(faint.is_empty(), "dark {dark}: {faint:#?}");
        assert!(least.len() > 30, "{least:?}");
    }
}
