//! Every file, every recipe, and what is refused.

use std::fs;

use serde_json::{Value, json};

use super::*;

fn catalogue() -> Catalogue {
    Catalogue::load(None).unwrap()
}

fn ask(family: &str, recipe: &str, gpu: &str, dtype: &str) -> Selector {
    let [family, recipe, gpu, dtype] = [family, recipe, gpu, dtype].map(str::to_owned);
    Selector { family, recipe, gpu, dtype, task: "pretrain".to_owned(), variant: None, num_gpus: None }
}

/// `tests/data/recipe_table.tsv` was made from the recipes of Megatron-Bridge at 067f987, not from our files.
#[test]
fn selection_gives_the_table() {
    let catalogue = catalogue();
    let table = include_str!("../../tests/data/recipe_table.tsv");
    let mut lines = table.lines();
    let header: Vec<&str> = lines.next().unwrap().split('\t').collect();
    let mut checked = 0;
    for line in lines {
        let cells: Vec<&str> = line.split('\t').collect();
        let cell = |name: &str| cells[header.iter().position(|h| *h == name).unwrap()];
        let selector = Selector {
            task: cell("task").to_owned(),
            variant: (!cell("variant").is_empty()).then(|| cell("variant").to_owned()),
            num_gpus: cell("num_gpus").parse().ok(),
            ..ask(cell("family"), cell("recipe"), cell("gpu"), cell("dtype"))
        };
        let recipe = catalogue.select(&selector).unwrap();
        assert_eq!(recipe.function, cell("function"));
        let text = |key: &str| match &recipe.values[key] {
            Value::Null => String::new(),
            Value::String(s) => s.clone(),
            Value::Array(names) => names.iter().map(|n| n.as_str().unwrap()).collect::<Vec<_>>().join("+"),
            other => other.to_string(),
        };
        for (column, key) in [
            ("tp", "model.tensor_model_parallel_size"),
            ("pp", "model.pipeline_model_parallel_size"),
            ("cp", "model.context_parallel_size"),
            ("ep", "model.expert_model_parallel_size"),
            ("etp", "model.expert_tensor_parallel_size"),
            ("vp", "model.virtual_pipeline_model_parallel_size"),
            ("mbs", "train.micro_batch_size"),
            ("gbs", "train.global_batch_size"),
            ("seq", "model.seq_length"),
            ("cuda_graph_impl", "model.cuda_graph_impl"),
            ("cuda_graph_scope", "model.cuda_graph_scope"),
        ] {
            assert_eq!(text(key), cell(column), "{}: {key}", recipe.function);
        }
        checked += 1;
    }
    assert_eq!((checked, catalogue.recipes().len(), catalogue.models().len()), (438, 438, 25));
}

#[test]
fn every_model_has_its_layers() {
    for model in catalogue().models() {
        assert!(layer_kinds(&model.architecture).is_ok(), "{}", model.model);
    }
}

#[test]
fn another_gpu_count_takes_the_default() {
    let selector = |num_gpus| Selector { num_gpus, ..ask("LLAMA", "Llama3_8B", "h100", "bf16") };
    let count = |num_gpus| catalogue().select(&selector(num_gpus)).unwrap().num_gpus;
    assert_eq!((count(None), count(Some(64)), count(Some(16))), (8, 64, 8));
}

#[test]
fn an_alias_has_its_targets_settings() {
    let catalogue = catalogue();
    let asked = Selector { num_gpus: Some(256), ..ask("llama", "llama31_405b", "b200", "bf16") };
    let alias = catalogue.select(&asked).unwrap();
    let target = catalogue.recipes().iter().find(|r| Some(&r.function) == alias.alias_of.as_ref()).unwrap();
    assert_eq!((alias.gpu.as_str(), target.gpu.as_str()), ("b200", "gb200"));
    assert_eq!(alias.values, target.values);
}

#[test]
fn the_march_setting_of_qwen3_30b() {
    let recipe = catalogue().select(&ask("qwen", "qwen3_30b_a3b", "h100", "bf16")).unwrap();
    assert_eq!(recipe.values["comm_overlap.overlap_moe_expert_parallel_comm"], json!(false));
    assert_eq!(recipe.values["model.cuda_graph_scope"], json!(["moe_router", "moe_preprocess"]));
}

#[test]
fn a_dtype_without_a_flag_is_a_variant() {
    let selector =
        Selector { variant: Some("fp8_ds".to_owned()), ..ask("qwen", "qwen3_30b_a3b", "h100", "bf16") };
    assert_eq!(catalogue().select(&selector).unwrap().dtype, "fp8_ds");
}

#[test]
fn the_level_that_failed_is_named() {
    let message = |selector: Selector| catalogue().select(&selector).unwrap_err().to_string();
    assert!(message(ask("lama", "llama3_8b", "h100", "bf16")).contains("did you mean llama?"));
    assert!(
        message(ask("qwen", "llama3_8b", "h100", "bf16")).contains("did you mean -m llama -mr llama3_8b?")
    );
    let gpu = message(ask("llama", "llama3_8b", "a100", "bf16"));
    assert!(gpu.contains("-g a100 for -m llama -mr llama3_8b") && gpu.contains("h100, r100, vr200"), "{gpu}");
    let variant =
        message(Selector { variant: Some("dev".to_owned()), ..ask("llama", "llama3_8b", "h100", "bf16") });
    assert!(variant.contains("there is one without -cv"), "{variant}");
    let long = "x".repeat(3000);
    assert!(message(ask(&long, "llama3_8b", "h100", "bf16")).len() < 500);
    let variant = Selector { variant: Some(long), ..ask("llama", "llama3_8b", "h100", "bf16") };
    assert!(message(variant).len() < 500);
}

/// Loads one user's file.
fn load(text: &str) -> Result<Catalogue, RecipeError> {
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("mine")).unwrap();
    fs::write(dir.path().join("mine/file.json"), text).unwrap();
    Catalogue::load(Some(dir.path()))
}

#[test]
fn a_users_file_extends_or_replaces() {
    let entry = r#"{ "gpu": "h100", "dtype": "bf16", "gpus": 8, "set": { "model.seq_length": 512 } }"#;
    let head = r#""family": "llama", "model": "llama3_8b""#;
    let variant = entry.replace("\"gpus\"", "\"variant\": \"short\", \"gpus\"");
    let extended = load(&format!("{{ {head}, \"recipes\": [{variant}] }}")).unwrap();
    let short = Selector { variant: Some("short".to_owned()), ..ask("llama", "llama3_8b", "h100", "bf16") };
    assert_eq!(extended.select(&short).unwrap().values["model.seq_length"], json!(512));
    assert_eq!(extended.recipes().len(), 439);
    let architecture = r#""architecture": { "num_layers": 2, "hidden_size": 64, "num_attention_heads": 2,
        "vocab_size": 256, "seq_length": 64 }"#;
    let replaced = load(&format!("{{ {head}, {architecture}, \"recipes\": [{entry}] }}")).unwrap();
    let recipe = replaced.select(&ask("llama", "llama3_8b", "h100", "bf16")).unwrap();
    assert_eq!((recipe.values["model.num_layers"].clone(), recipe.is_default), (json!(2), true));
    assert_eq!(replaced.recipes().len(), 438 - 41 + 1);
}

#[test]
fn a_wrong_file_is_refused_with_the_place() {
    let message = |text: &str| load(text).unwrap_err().to_string();
    let head = r#""family": "llama", "model": "llama3_8b""#;
    let one = |entry: &str| format!("{{ {head}, \"recipes\": [{{ {entry} }}] }}");
    let truncated = message("{ \"family\": ");
    assert!(truncated.contains("mine/file.json"), "{truncated}");
    assert!(
        message(&format!("{{ {head}, \"colour\": 1, \"recipes\": [] }}")).contains("unknown field `colour`")
    );
    let base = r#""gpu": "h100", "dtype": "bf16", "gpus": 8"#;
    let key = message(&one(&format!("{base}, \"set\": {{ \"model.hiden_size\": 1 }}")));
    assert!(key.contains("recipes[0].set.model.hiden_size") && key.contains("model.hidden_size"), "{key}");
    let kind = message(&one(&format!("{base}, \"set\": {{ \"model.hidden_size\": \"x\" }}")));
    assert!(kind.contains("a whole number"), "{kind}");
    let path = message(&one(r#""gpu": "h100", "dtype": "bf16", "gpus": "8""#));
    assert!(path.contains("recipes[0].gpus"), "{path}");
    let alias = message(&one(&format!("{base}, \"variant\": \"x\", \"alias\": \"nothing\"")));
    assert!(alias.contains("there is no recipe nothing"), "{alias}");
    let unbuilt = r#"{ "family": "llama", "model": "llama9", "recipes": [] }"#;
    assert!(message(unbuilt).contains("is not built in"));
    assert!(Catalogue::load(Some(Path::new("/nonexistent/dir"))).is_err());
}

/// Loads a user's files.
fn load_all(files: &[(&str, &str)]) -> Result<Catalogue, RecipeError> {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        fs::write(dir.path().join(name), text).unwrap();
    }
    Catalogue::load(Some(dir.path()))
}

#[test]
fn two_files_do_not_state_one_thing() {
    let file = |variant: &str, more: &str| {
        format!(
            r#"{{ "family": "llama", "model": "llama3_8b", {more}
                 "recipes": [{{ "gpu": "h100", "dtype": "bf16", "gpus": 8, "variant": "{variant}" }}] }}"#
        )
    };
    let architecture = r#""architecture": { "num_layers": 2, "hidden_size": 64, "num_attention_heads": 2,
        "vocab_size": 256, "seq_length": 64 },"#;
    let both = |a: &str, b: &str| load_all(&[("a.json", a), ("b.json", b)]).map(|c| c.recipes().len());
    assert_eq!(both(&file("x", ""), &file("y", "")).unwrap(), 440);
    assert_eq!(both(&file("x", architecture), &file("y", "")).unwrap(), 438 - 41 + 2);
    let three = [("a.json", file("x", "")), ("b.json", file("y", "")), ("c.json", file("x", ""))];
    let three: Vec<(&str, &str)> = three.iter().map(|(n, t)| (*n, t.as_str())).collect();
    for wrong in [
        both(&file("x", ""), &file("x", "")),
        both(&file("x", architecture), &file("x", "")),
        both(&file("x", ""), &file("y", architecture)),
        both(&file("x", architecture), &file("y", architecture)),
        load_all(&three).map(|c| c.recipes().len()),
    ] {
        let said = wrong.unwrap_err().to_string();
        assert!(said.contains("a.json") && (said.contains("b.json") || said.contains("c.json")), "{said}");
    }
}

#[test]
fn words_that_nobody_can_ask_for_and_keys_stated_twice_are_refused() {
    let file = |entry: &str, more: &str| {
        format!(r#"{{ "family": "llama", "model": "llama3_8b", {more} "recipes": [{{ {entry} }}] }}"#)
    };
    let fine = r#""gpu": "h100", "dtype": "bf16", "gpus": 8, "variant": "x""#;
    assert!(load(&file(fine, "")).is_ok());
    let with = |from: &str, to: &str| file(&fine.replace(from, to), "");
    let set = |set: &str| file(&format!("{fine}, \"set\": {{ {set} }}"), "");
    for (text, place, what) in [
        (with("h100", "x100"), "recipes[0].gpu", "`x100` is none of h100"),
        (with("bf16", "fp64"), "recipes[0].dtype", "`fp64` is none of bf16"),
        (with(r#""variant": "x""#, r#""task": "train""#), "recipes[0].task", "pretrain"),
        (with(r#""x""#, r#""X""#), "recipes[0].variant", "lower case"),
        (with(r#""x""#, r#""x\u001b[31m""#), "recipes[0].variant", r"`x\u{1b}[31m` must be"),
        (with(r#""x""#, r#"".x""#), "recipes[0].variant", "the first no `.`"),
        (with(r#""x""#, &format!("\"{}\"", "x".repeat(3000))), "recipes[0].variant", "(3000 characters)"),
        (file(fine, "").replace("\"llama\"", "\"../x\""), "family", "`../x` must be"),
        (file(fine, "").replace("llama3_8b", "../../a/b"), "model", "`../../a/b` must be"),
        (set(r#""model.vision": {}"#), "set.model.vision", "model.vision.depth is missing"),
        (
            set(r#""model.rope_scaling": { "type": "zzz" }"#),
            "set.model.rope_scaling",
            "none of default, linear",
        ),
        (set(r#""model.q_lora_rank": 1000000007"#), "set.model.q_lora_rank", "outside 1 to 1048576"),
        (file(fine, "").replace("\"llama\"", "\"Llama\""), "family", "lower case"),
        (file(fine, r#""when": [{ "gpu": ["h100", "h20"], "set": {} }],"#), "when[0].gpu", "`h20`"),
        (file(fine, r#""when": [{ "dtype": "fp64", "set": {} }],"#), "when[0].dtype", "`fp64`"),
        (
            set(r#""model.seq_length": 512, "model.seq_length": 1024"#),
            "set",
            "`model.seq_length` is stated twice",
        ),
        (set(r#""model.vision": { "depth": 1, "depth": 2 }"#), "set", "`depth` is stated twice"),
        (file(fine, r#""settings": { "env.A": "1", "env.A": "2" },"#), "settings", "stated twice"),
        (file(&format!("{fine}, \"gpus\": 16"), ""), "recipes[0]", "duplicate field"),
    ] {
        let said = load(&text).unwrap_err().to_string();
        assert!(said.contains(place) && said.contains(what), "{text}: {said}");
    }
}

/// What chooses a recipe on the command line is what files may say.
#[test]
fn files_know_the_words_of_the_options() {
    use clap::CommandFactory;
    let command = crate::args::Args::command();
    for (option, known) in
        [("gpu", &super::file::words::GPUS[..]), ("compute_dtype", &super::file::words::DTYPES[..5])]
    {
        let arg = command.get_arguments().find(|a| a.get_id() == option).unwrap();
        let words: Vec<String> = arg.get_possible_values().iter().map(|v| v.get_name().to_owned()).collect();
        assert_eq!(words, known);
    }
}

#[cfg(unix)]
#[test]
fn links_that_lead_nowhere_are_told() {
    for to in ["nothing.json", "x.json"] {
        let dir = tempfile::tempdir().unwrap();
        fs::create_dir(dir.path().join("mine")).unwrap();
        for folder in ["", "mine"] {
            let link = dir.path().join(folder).join("x.json");
            std::os::unix::fs::symlink(to, &link).unwrap();
            let said = Catalogue::load(Some(dir.path())).unwrap_err().to_string();
            assert!(said.contains("x.json") && said.contains("link"), "{said}");
            fs::remove_file(link).unwrap();
        }
    }
}

#[test]
fn lists_and_shows() {
    let catalogue = catalogue();
    let mut text = Vec::new();
    print_list(&catalogue, Some("llama3_8b"), false, &mut text).unwrap();
    let text = String::from_utf8(text).unwrap();
    assert!(text.ends_with("41 of 438 recipes\n"), "{text}");
    let mut listed = Vec::new();
    print_list(&catalogue, None, true, &mut listed).unwrap();
    let listed: Value = serde_json::from_slice(&listed).unwrap();
    assert_eq!(listed.as_array().unwrap().len(), 438);
    let show = |name: &str| {
        let mut out = Vec::new();
        print_show(&catalogue, name, &mut out).map(|()| String::from_utf8(out).unwrap())
    };
    assert!(show("qwen3_30b_a3b").unwrap().contains("model.num_moe_experts = 128"));
    assert!(
        show("llama3_8b_pretrain_8gpu_h100_bf16_config").unwrap().contains("model.context_parallel_size = 2")
    );
    let share = show("llama3_8b_pretrain_8gpu_h100_bf16_config").unwrap();
    assert!(
        share.contains("layers 32, embedding and loss") && share.contains("4096 tokens a micro-batch"),
        "{share}"
    );
    let impossible = show("deepseek_v3_pretrain_64gpu_h100_bf16_config").unwrap();
    assert!(impossible.contains("impossible") && impossible.contains("etp 1 x ep 64 x pp 8"), "{impossible}");
    assert!(show("qwen3_30b").unwrap_err().to_string().contains("did you mean qwen3_30b_a3b?"));
}
