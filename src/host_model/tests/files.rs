//! Files of host models: what is read, and what is refused in words.

use super::*;

#[test]
fn files_are_read_strictly() {
    let with = |from: &str, to: &str| {
        assert!(PYTORCH.contains(from), "{from}");
        HostModel::parse("x.json", &PYTORCH.replacen(from, to, 1)).unwrap_err().to_string()
    };
    assert!(with("\"format\": 2", "\"format\": 3").contains("format 3 is neither 1 nor 2"));
    assert!(with("0.6396", "-1").contains("attn is -1 ms"));
    assert!(with("0.6396", "1e300").contains("ms"));
    assert!(with("\"attn\"", "\"attention\"").contains("layers[0].forward_ms: part \"attention\""));
    // No part of such a layer: no launch would ever take its time.
    let mamba = with("{\"attn\": 0.6396, \"mlp\": 0.4408}", "{\"mamba\": 1}");
    assert!(
        mamba
            .contains("layers[0].forward_ms: part \"mamba\" is none of layer \"dense\", which has attn, mlp"),
        "{mamba}"
    );
    let mlp =
        with("\"backward_ms\": {\"mamba\": 3.4133}", "\"backward_ms\": {\"mamba\": 3.4133, \"mlp\": 1}");
    assert!(mlp.contains("layers[5].backward_ms: part \"mlp\" is none of layer \"mamba\""), "{mlp}");
    for table in ["forward_ms", "backward_ms"] {
        let empty = with(
            &format!("\"{table}\": {{\"attn\": 0.6396, \"mlp\": 0.4408}}"),
            &format!("\"{table}\": {{}}"),
        );
        assert!(empty.contains(&format!("layers[0].{table} is empty")), "{empty}");
    }
    assert!(with("\"dense\"", "\"sparse\"").contains("layer \"sparse\""));
    assert!(with("\"module_replays\"", "\"replays\"").contains("replays"));
    assert!(with("\"tokens\": 128", "\"tokens\": 0").contains("tokens is 0"));
    let of_replays =
        |from: &str, to: &str| with(&format!("\"parts\": [\"mlp\"]{from}"), &format!("\"parts\": {to}"));
    assert!(of_replays("", "[\"mpl\"]").contains("module_replays[1]: part \"mpl\""));
    assert!(
        of_replays("", "[\"moe_router\"]")
            .contains("module_replays[1]: part \"moe_router\" is none of layer \"dense\"")
    );
    assert!(of_replays("", "[]").contains("module_replays[1]: parts is empty"));
    assert!(of_replays("", "[\"attn\"]").contains("those of module_replays[0]"));
    let negative = "[\"mlp\"], \"forward_ms\": -0.5";
    assert!(
        of_replays(", \"forward_ms\": 0.175", negative).contains("module_replays[1]: forward_ms is -0.5 ms")
    );
    // The last of two would win, and which was meant is not known.
    for table in ["forward_ms", "backward_ms"] {
        let twice = with(&format!("\"{table}\": {{"), &format!("\"{table}\": {{\"attn\": 0.1, "));
        let named = format!("layers[0].{table}: part \"attn\" is stated twice");
        assert!(twice.contains(&named), "{twice}");
    }
    let twice = with("\"iteration_replay_ms\"", "\"name\"");
    assert!(twice.starts_with("--host_model x.json: duplicate field `name`"), "{twice}");
    let more = HostModel::parse("x.json", &format!("{PYTORCH} {{}}")).unwrap_err().to_string();
    assert!(more.contains("trailing"), "{more}");
    assert!(HostModel::parse("x.json", "{").is_err());
    let missing = HostModel::load("no/such/file.json").unwrap_err().to_string();
    assert!(missing.contains("no/such/file.json") && missing.contains("calibrate"), "{missing}");
    assert!(HostModel::load("bare").unwrap().is_none());
}

#[test]
fn a_kind_of_layer_that_the_model_lacks_is_told_in_words() {
    let (plan, tokens) = plan_of(&format!("{QWEN} -sl 512 --cuda_graph_scope attn"));
    let notice = |model: &HostModel| model.costs(&plan, tokens).1.notice(&model.name);
    assert_eq!(notice(&pytorch()), None);
    let mut without = pytorch();
    without.layers.retain(|p| p.layer != "moe");
    let said = notice(&without).unwrap();
    let share = without.costs(&plan, tokens).1.other_fraction();
    assert!(share > 0.5 && said.contains(&format!("as {:.0} %", share * 100.0)), "{said}");
    assert!(said.starts_with("The host model pytorch has no moe layers:"), "{said}");
}

#[test]
fn a_part_that_the_model_lacks_is_told_in_words() {
    let (plan, tokens) = plan_of(&format!("{LLAMA} -sl 512 --cuda_graph_scope attn"));
    let notice = |model: &HostModel| model.costs(&plan, tokens).1.notice(&model.name).unwrap_or_default();
    let mut model = pytorch();
    model.layers.iter_mut().for_each(|p| _ = p.backward_ms.remove("mlp"));
    assert!(notice(&model).contains("has no backward of mlp in dense layers: each"), "{}", notice(&model));
    // The other sizes have it.
    let mut some = pytorch();
    some.layers.iter_mut().filter(|p| p.tokens == 128).for_each(|p| _ = p.backward_ms.remove("mlp"));
    assert_eq!(notice(&some), "");
    model.layers.iter_mut().for_each(|p| _ = p.forward_ms.remove("mlp"));
    assert!(notice(&model).contains("has no mlp in dense layers: each"), "{}", notice(&model));
    // What the run has none of is not missed.
    model = pytorch();
    for point in model.layers.iter_mut().filter(|p| p.layer != "dense") {
        (point.forward_ms, point.backward_ms) = (BTreeMap::from([("attn".into(), 1.0)]), BTreeMap::new());
    }
    assert_eq!(notice(&model), "");
}

/// Files are refused by the table of parts: it must have all that layers have.
#[test]
fn no_layer_has_a_part_that_its_kind_has_not() {
    let mut seen = BTreeSet::new();
    for model in [
        "llama -mr llama3_8b -g h100",
        "qwen -mr qwen3_30b_a3b -g h100",
        "qwen -mr qwen3_next_80b_a3b -g b200",
        "deepseek -mr deepseek_v3 -g h100",
        "deepseek -mr deepseek_v4_flash -g gb200 -c fp8_mx --run_dtype bf16",
        "nemotronh -mr nemotronh_56b -g h100 -c fp8_cs --run_dtype bf16",
        "nemotronh -mr nemotron_3_nano -g h100",
    ] {
        let (plan, tokens) = plan_of(&format!("-m {model} -sl 512 --max_microbatches 1"));
        let program = &plan.eager.program;
        let kinds = layer_kinds(program);
        for launch in &program.launches {
            let Some(kind) = launch.layer.and_then(|layer| kinds.get(&layer)) else { continue };
            let Some(part) = part_name(launch.part) else { continue };
            let (_, parts) = KINDS.iter().find(|(name, _)| name == kind).unwrap();
            assert!(parts.contains(&part), "{model}: {part} in {kind}");
            seen.insert((*kind, part));
        }
        assert_eq!(pytorch().costs(&plan, tokens).1.notice("pytorch"), None, "{model}");
    }
    let all = KINDS.iter().flat_map(|(kind, parts)| parts.iter().map(move |part| (*kind, *part)));
    assert_eq!(seen, all.collect());
}

/// Files that earlier versions of the script wrote.
#[test]
fn a_file_is_told_from_another_of_its_name_by_what_it_holds() {
    let folder = tempfile::tempdir().unwrap();
    let name = |text: &str| {
        let path = folder.path().join("model.json");
        std::fs::write(&path, text).unwrap();
        HostModel::load(path.to_str().unwrap()).unwrap().unwrap().name
    };
    let mine = PYTORCH.replace("\"name\": \"pytorch\"", "\"name\": \"mine\"");
    let (one, same) = (name(&mine), name(&mine));
    assert_eq!(one, same);
    assert!(one.starts_with("mine:") && one.len() == "mine:".len() + 8, "{one}");
    assert_ne!(one, name(&mine.replace("\"iteration_replay_ms\": 0.298", "\"iteration_replay_ms\": 0.299")));
    // Words that mean something else in a row.
    for taken in ["pytorch", "bare"] {
        let path = folder.path().join("model.json");
        std::fs::write(&path, mine.replace("\"mine\"", &format!("\"{taken}\""))).unwrap();
        let said = HostModel::load(path.to_str().unwrap()).unwrap_err().to_string();
        assert!(said.contains(&format!("name {taken:?} is that of a built-in model")), "{said}");
    }
    assert_eq!(pytorch().name, "pytorch");
}

#[test]
fn format_1_has_one_figure_for_all_replays() {
    let file = |format: u64, replays: &str| {
        let text = format!(
            r#"{{"format": {format}, "name": "old", "source": "a test",
                "layers": [{{"layer": "dense", "tokens": 512, "forward_ms": {{"attn": 1}}, "backward_ms": {{"attn": 2}}}}],
                {replays} "iteration_replay_ms": 0.2, "other_launch_ms": 0.03}}"#
        );
        HostModel::parse("old.json", &text)
    };
    let (number, list) = ("\"module_replay_ms\": 0.125,", "\"module_replays\": [],");
    let model = file(1, number).unwrap();
    for kind in [Some("dense"), Some("moe"), Some("mamba"), None] {
        for pass in [Pass::Forward, Pass::Backward] {
            assert_eq!(model.replay_ms(kind, &BTreeSet::from(["attn"]), pass), 0.125, "{kind:?}");
        }
    }
    let refused = |format, replays: &str| file(format, replays).unwrap_err().to_string();
    assert!(refused(1, "").contains("format 1 needs module_replay_ms"));
    assert!(refused(1, list).contains("format 1 needs module_replay_ms"));
    assert!(refused(1, &format!("{number}{list}")).contains("has no module_replays"));
    assert!(refused(2, number).contains("format 2 needs module_replays"));
    assert!(refused(2, list).contains("module_replays is empty"));
    assert!(refused(1, "\"module_replay_ms\": -1,").contains("-1 ms"));
}
