"""Every word on the page, in every language it speaks: one table, `WORDS[language][key]`.

`{name}` marks what is filled in. The same templates are filled here (reports, tests, the screen reader's summary
of an export) and in the browser (the stage), so a template holds plain names only, no format specifications.

    say("en", "why.accepted", token="·cat", parent="·the", p="0.83", c="0.71")

Wherever the claim that speculation changes nothing is made, a verdict stands beside it: no template here makes
that claim by itself.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from eagle_core.drafters import METHODS
from eagle_core.metrics import METRICS

if TYPE_CHECKING:
    from eagle_core.events import Start

__all__ = ["LANGUAGES", "WORDS", "about", "auto", "knows_the_dice", "number", "say", "target_name", "visible"]

LANGUAGES = {"en": "English", "zh": "简体中文"}

_METHODS_ZH = {
    "vanilla": (
        "普通解码",
        "目标模型每次前向得到一个词元：基准。",
    ),
    "lookup": (
        "提示查找",
        "在前文中找到最近几个词元上次出现的位置，照抄其后文作为草稿。",
    ),
    "chain": (
        "草稿模型",
        "较小的语言模型逐个起草它认为最可能的词元。",
    ),
    "chain-sampled": (
        "草稿模型（采样）",
        "较小的语言模型采样起草；每个词元以概率 min(1, p/q) 被接受。",
    ),
    "eagle1": (
        "EAGLE-1",
        "单层草稿头延续目标模型的特征，填满一棵形状固定的树。",
    ),
    "eagle2": (
        "EAGLE-2",
        "EAGLE-1 的草稿头在有把握的地方生长树，再保留价值最高的节点。",
    ),
    "eagle3": (
        "EAGLE-3",
        "草稿头用自己的草稿训练过，读取目标模型的低、中、高层特征来生长树。",
    ),
    "hybrid": (
        "EAGLE + 查找",
        "EAGLE 草稿头的树，再接上从前文找到的段落：共用一个预算，一起重排。",
    ),
}
"""Label and explanation of each method; the English ones are the engine's own."""

_TABLE: dict[str, tuple[str, str]] = {
    # The page
    "title": ("EAGLE playground", "EAGLE 演示台"),
    "tagline": (
        "Watch a draft tree grow, be judged, and become text.",
        "看草稿树如何生长、接受检验、变成文字。",
    ),
    "brand": (
        "# EAGLE playground\n\nWatch a draft tree grow, be judged, and become text.",
        "# EAGLE 演示台\n\n看草稿树如何生长、接受检验、变成文字。",
    ),
    "prompt": ("Your message", "你的消息"),
    "prompt.hint": (
        "Ask something, or keep watching the recording",
        "输入问题，或继续观看录制的回放",
    ),
    "send": ("Send", "发送"),
    "stop": ("Stop", "停止"),
    "new": ("New conversation", "新对话"),
    "new.short": ("New", "新建"),
    "method": ("Method", "方法"),
    "knobs.tree": ("Tree", "草稿树"),
    "knobs.sampling": ("Sampling", "采样"),
    "knobs.answer": ("Answer", "回答"),
    "knobs.pair": ("Models", "模型"),
    "total_token": ("Nodes of the tree", "树的节点数"),
    "total_token.info": (
        "root included; -1 is auto, by measuring",
        "含根；-1 为自动（实测）",
    ),
    "depth": ("Depth of the tree", "树的深度"),
    "top_k": ("Top-k of the tree", "树的 top-k"),
    "expand_by": ("Beam ranks by", "束的排序依据"),
    "expand_by.value": ("value (product along the path)", "价值（路径上的乘积）"),
    "expand_by.confidence": ("the node's own confidence", "节点自身的置信度"),
    "rerank": ("Rerank all candidates", "对全部候选重排"),
    "coupled": ("Draft knowing the dice", "起草时已知骰子"),
    "coupled.known": ("dice known to the drafter", "草稿模型已知骰子"),
    "coupled.info": (
        "Above temperature 0, the seed decides the noise of each draw; a drafter that knows it guesses the draw. "
        "The text is the same",
        "温度高于 0 时，每次抽样的噪声由种子决定；草稿模型若知道噪声，便直接猜抽样结果。文本不变",
    ),
    "temperature": ("Temperature (0 is greedy)", "温度（0 为贪心）"),
    "top_p": ("Top-p", "Top-p"),
    "sampling_top_k": ("Top-k sampling", "Top-k 采样"),
    "sampling_top_k.info": ("0 is off", "0 为关闭"),
    "min_p": ("Min-p", "Min-p"),
    "seed": ("Seed", "随机种子"),
    "max_new_tokens": ("Tokens at most", "最多词元"),
    "system": ("System prompt", "系统提示"),
    "more.knobs": ("More", "更多"),
    "race": ("Check each answer against plain decoding", "用普通解码核对每个回答"),
    "race.info": (
        "The same prompt is answered again without drafting: gives the verdict and the measured speed-up",
        "对同一提示不打草稿再回答一遍：给出结论和实测加速比",
    ),
    "unused": ("{method} does not use this", "{method} 不使用此项"),
    "recording": ("Recording", "录制"),
    "recording.info": ("really run; the command is in assets/traces", "真实运行；命令见 assets/traces"),
    "recording.sky3": ("Why is the sky blue? · EAGLE-3", "Why is the sky blue? · EAGLE-3"),
    "recording.copy": ("Repetition · prompt lookup", "重复 · 提示查找"),
    "recording.repeat": ("Repetition · EAGLE-3", "重复 · EAGLE-3"),
    "recording.both": ("Repetition · hybrid", "重复 · 混合"),
    "recording.easy": ("Easy: 10+2= · EAGLE-3", "容易：10+2= · EAGLE-3"),
    "recording.hard": ("Hard: 10+2 · EAGLE-3", "困难：10+2 · EAGLE-3"),
    "recording.code": ("Code: Fibonacci · EAGLE-3", "代码：斐波那契 · EAGLE-3"),
    "recording.french": ("Another language · EAGLE-3", "另一种语言 · EAGLE-3"),
    "recording.dice": ("Why is the sky blue? · EAGLE-3, T = 1", "Why is the sky blue? · EAGLE-3，T = 1"),
    "recording.sky2": ("Why is the sky blue? · EAGLE-2", "Why is the sky blue? · EAGLE-2"),
    "recording.sky1": ("Why is the sky blue? · EAGLE-1", "Why is the sky blue? · EAGLE-1"),
    "language": ("Language", "语言"),
    "status.queue": (
        "{n} ahead of you; the model answers one visitor at a time",
        "前面还有 {n} 位；模型一次回答一位访客",
    ),
    "status.loading": ("Loading the models: {what}…", "正在加载模型：{what}……"),
    "load.engine": ("starting the engine", "启动引擎"),
    "load.download": ("downloading, once", "下载（仅一次）"),
    "load.unpack": ("unpacking", "解压"),
    "load.convert": ("converting, once", "转换（仅一次）"),
    "load.target": ("the target", "目标模型"),
    "load.drafters": ("the drafters", "草稿模型"),
    "status.stopping": ("Stopping…", "正在停止……"),
    "status.error": ("{text}", "{text}"),
    "status.broken": (
        "Something broke here; the log of the server says what",
        "这里出了故障；原因见服务器日志",
    ),
    "status.busy": ("Still answering; Stop ends it", "仍在回答；按“停止”可结束"),
    "status.cancelled": ("Stopped before anything was run", "在运行之前已停止"),
    "status.prefill": ("The target reads the prompt…", "目标模型正在读取提示……"),
    "status.plain": (
        "The same prompt again, decoded plainly, for the verdict…",
        "正在用普通解码重新回答同一提示，以得出结论……",
    ),
    # Phases
    "phase.grow": ("Draft", "起草"),
    "phase.rerank": ("Rerank", "重排"),
    "phase.mask": ("Mask", "掩码"),
    "phase.verify": ("Verify", "验证"),
    "phase.accept": ("Accept", "接受"),
    "phase.commit": ("Commit", "提交"),
    # Captions: what happens now
    "say.idle": ("Nothing to show yet", "还没有可显示的内容"),
    "say.grow": (
        "Drafting: forward {i} of {n}, {made} candidates at depth {level}",
        "起草：第 {i}/{n} 次前向，第 {level} 层有 {made} 个候选",
    ),
    "say.grow.copy": (
        "Drafting without a model: {n} tokens copied from the text so far",
        "不用模型起草：从已有文本复制 {n} 个词元",
    ),
    "say.rerank": (
        "Rerank: the {kept} most valuable stay, {dropped} candidates go",
        "重排：保留价值最高的 {kept} 个，舍弃 {dropped} 个候选",
    ),
    "say.mask": (
        "Flatten: {n} nodes in one row, each sees its own ancestors",
        "展平：{n} 个节点排成一行，每个只看见自己的祖先",
    ),
    "say.verify": ("Verify: one target forward over {n} nodes", "验证：目标模型一次前向看完 {n} 个节点"),
    "say.verify.one": ("One target forward over the last token", "目标模型对最后一个词元做一次前向"),
    "say.accept": (
        "Accepted {a} of {d} levels, then the target’s own “{bonus}”",
        "接受 {a}/{d} 层，再加上目标模型自己的“{bonus}”",
    ),
    "say.accept.none": (
        "No draft was the target’s draw; its own “{bonus}” goes in",
        "草稿词元都不是目标模型的选择；写入它自己的“{bonus}”",
    ),
    "say.accept.plain": ("The target’s own “{bonus}”", "目标模型自己的“{bonus}”"),
    "say.accept.cut": (
        "Accepted {a} of {d} levels; the answer ends among them, after {e} more",
        "接受 {a}/{d} 层；回答在其中结束，又输出 {e} 个",
    ),
    "say.commit": (
        "Commit: {kept} of {n} rows stay in the cache, {gone} leave it",
        "提交：{n} 行中 {kept} 行留在缓存，{gone} 行离开",
    ),
    # Finish
    "finish.eos": ("ended by itself", "自然结束"),
    "finish.stop": ("met a stop string", "遇到停止字符串"),
    "finish.length": ("reached the token limit", "达到词元上限"),
    "finish.context": ("reached the context limit", "达到上下文上限"),
    "finish.cancelled": ("stopped by you", "已被你停止"),
    "finish.cut": ("recording ends here", "录制到此为止"),
    "foot.steps": ("{steps} steps", "{steps} 步"),
    "foot.tau": ("τ {tau}", "τ {tau}"),
    "foot.speed": ("{tps} tokens/s", "{tps} 词元/秒"),
    "foot.accepted": ("{a} of {d} drafted accepted", "起草 {d} 个，接受 {a} 个"),
    "define.steps": (METRICS["steps"].definition, "预填充之后目标模型的前向次数：每次包括起草、验证和提交。"),
    "define.tau": (
        METRICS["tau"].definition,
        "目标模型每次前向输出的词元数，对所有步取平均。"
        "包含每步目标模型自己的词元，不含预填充得到的首个词元；普通解码为 1。",
    ),
    "define.accepted": (
        METRICS["accepted"].definition,
        "被接受并输出的草稿词元数。位于被拒绝词元之后的巧合不算。",
    ),
    "define.tokens_per_second": (
        METRICS["tokens_per_second"].definition,
        "各步输出的词元数除以各步的实际时间；不含预填充。",
    ),
    "define.speedup": (
        "Tokens per second of this run over those of plain decoding of the same prompt by the same target on the same "
        "machine, one run each, right after one another; prefill excluded in both.",
        "本次运行的每秒词元数除以同一目标模型在同一台机器上对同一提示做普通解码的每秒词元数；各运行一次，先后进行，均不含预填充。",
    ),
    "foot.speedup": ("{x}× plain decoding, measured", "实测为普通解码的 {x} 倍"),
    "origin.plain": ("first token, from the prefill", "首个词元，来自预填充"),
    "origin.draft": ("drafted and accepted", "起草并被接受"),
    "origin.bonus": ("the target’s own", "目标模型自己的"),
    # The verdict
    "verdict.equal": (
        "equal to plain decoding, {n} of {n} tokens",
        "与普通解码相同，{n}/{n} 个词元",
    ),
    "verdict.tie": (
        "equal up to a tie at token {at} (gap {gap})",
        "直到第 {at} 个词元出现并列为止均相同（差 {gap}）",
    ),
    "verdict.different": (
        "DIFFERENT at token {at}: here “{mine}”, plain decoding “{plain}” (gap {gap})",
        "第 {at} 个词元不同：这里是“{mine}”，普通解码是“{plain}”（差 {gap}）",
    ),
    "verdict.best": ("the target’s two best there", "目标模型在此处最好的两个"),
    "verdict.ratio": (
        "no verdict by ids: the ratio rule keeps the distribution, not the draws",
        "无法按词元下结论：比率规则保持的是分布，不是每次的选择",
    ),
    "verdict.none": ("not checked against plain decoding", "尚未与普通解码核对"),
    "pays.yes": (
        "Speculation pays here: a step costs as much as {need} plain forwards and gives {tau} tokens.",
        "在这里投机解码划算：一步的代价相当于 {need} 次普通前向，得到 {tau} 个词元。",
    ),
    "pays.draft": (
        "Speculation does not pay here: a step costs {need} plain forwards ({draft} of them drafting) "
        "and gives {tau} tokens. "
        "Drafting is too dear for this target; fewer levels would help.",
        "在这里投机解码不划算：一步的代价相当于 {need} 次普通前向（其中起草 {draft}），只得到 {tau} 个词元。"
        "对这个目标模型来说起草太贵；减少层数会有帮助。",
    ),
    "pays.verify": (
        "Speculation does not pay here: a step costs {need} plain forwards ({verify} of them verifying) "
        "and gives {tau} tokens. "
        "This machine reads a tree hardly faster than token by token; fewer nodes would help.",
        "在这里投机解码不划算：一步的代价相当于 {need} 次普通前向（其中验证 {verify}），只得到 {tau} 个词元。"
        "这台机器读一棵树并不比逐个词元快多少；减少节点会有帮助。",
    ),
    "pays.accept": (
        "Speculation does not pay here: a step costs {need} plain forwards and gives {tau} tokens. "
        "Almost no draft is what the target draws on this text.",
        "在这里投机解码不划算：一步的代价相当于 {need} 次普通前向，只得到 {tau} 个词元。"
        "在这段文本上，草稿几乎都不是目标模型的选择。",
    ),
    "truth": ("Race and cost", "竞速与代价"),
    "truth.race": ("Replay the race", "回放竞速"),
    "truth.note": (
        "Run one after the other on the same machine, replayed together; the clock starts with the first token. "
        "At rest the bars stand where the faster one was done.",
        "在同一台机器上先后运行，一起回放；时钟从首个词元开始。静止时，条形停在较快者完成的时刻。",
    ),
    "truth.tokens": ("{n} tokens in {s} s", "{s} 秒 {n} 个词元"),
    "cost": ("Cost of each step", "每一步的代价"),
    "cost.even": (
        "line: what plain decoding would have taken for the tokens of the step",
        "线：普通解码生成这一步的词元所需的时间",
    ),
    "cost.draft": ("draft", "起草"),
    "cost.verify": ("verify", "验证"),
    "cost.other": ("other", "其他"),
    "cost.step": (
        "step {k}: draft {d} ms, verify {v} ms, other {o} ms, {n} tokens",
        "第 {k} 步：起草 {d} 毫秒，验证 {v} 毫秒，其他 {o} 毫秒，{n} 个词元",
    ),
    # What if
    "if": ("What if", "假如"),
    "if.title": ("What if this step had …", "假如这一步……"),
    "if.nodes": ("nodes", "节点"),
    "if.depth": ("depth", "深度"),
    "if.topk": ("top-k", "top-k"),
    "if.exact": (
        "exact: {kept} nodes, {a} accepted (recorded: {was})",
        "确定：{kept} 个节点，接受 {a} 个（录制：{was}）",
    ),
    "if.least": (
        "at least {a} accepted (recorded: {was}): the last of them was never verified, what follows it is unknown",
        "至少接受 {a} 个（录制：{was}）：最后一个未经验证，其后未知",
    ),
    "if.unknown": (
        "unknown: {why} was never drafted in this recording",
        "未知：此录制中没有起草过{why}",
    ),
    "if.deeper": ("a level below {d}", "第 {d} 层以下"),
    "if.wider": ("a child beyond the best {k}", "前 {k} 名之外的子节点"),
    "if.beam": ("what grows below “{token}”", "“{token}”以下的部分"),
    "if.none": ("this method grows no tree to change", "此方法没有可以改变的树"),
    # The node panel
    "node.token": ("Token", "词元"),
    "node.id": ("Id", "编号"),
    "node.bytes": ("Bytes", "字节"),
    "node.confidence": ("Confidence", "置信度"),
    "node.confidence.info": ("The drafter’s probability, given the parent", "草稿模型在父节点之后给出的概率"),
    "node.confidence.known": ("Confidence, dice known", "置信度（已知骰子）"),
    "node.confidence.coupled": (
        "The drafter’s probability that the target draws it after the parent, knowing the noise of the draw",
        "草稿模型在已知抽样噪声时，认为目标在父节点之后抽中它的概率",
    ),
    "node.value": ("Value", "价值"),
    "node.value.info": ("Product of confidences along the path", "路径上置信度的乘积"),
    "node.target": ("Target p", "目标概率"),
    "node.target.info": (
        "The target’s probability after its parent, after temperature and filters",
        "目标模型在父节点之后的概率（经温度与过滤）",
    ),
    "node.top": ("Before temperature", "温度之前"),
    "node.top.info": (
        "The target’s likeliest tokens here, before temperature and filters",
        "目标模型在此概率最高的词元（温度与过滤之前）",
    ),
    "node.draw": ("Target drew here", "目标在此选择"),
    "node.rank": ("Rank among siblings", "兄弟中的排名"),
    "node.rank.of": ("{rank} of {n}", "第 {rank} / {n}"),
    "node.place": ("Position · cache slot", "位置 · 缓存槽"),
    "node.depth": ("Depth", "深度"),
    "node.source": ("Drafted by", "起草者"),
    "source.head": ("the head", "草稿头"),
    "source.lookup": ("lookup, copied from the text so far", "查找：抄自已有文本"),
    "source.both": ("the head and lookup alike", "草稿头与查找一致"),
    "legend.lookup": ("looked up (square)", "查找得到（方角）"),
    "legend.both": ("head and lookup agree", "草稿头与查找一致"),
    "node.dropped": ("Not in the tree", "不在树中"),
    "why.title": ("Why is it so?", "为什么是这样？"),
    "why.root": (
        "The root: the last token of the text so far. The target has not read it yet, so its forward starts here.",
        "根：已有文本的最后一个词元。目标模型尚未读取它，因此前向从这里开始。",
    ),
    "why.accepted": (
        "Accepted: after “{parent}” the target drew “{draw}” ({dp}), and this is that token.",
        "被接受：在“{parent}”之后目标模型选择了“{draw}”（{dp}），正是这个词元。",
    ),
    "why.sibling": (
        "Rejected: after “{parent}” the target drew “{draw}” ({dp}), a sibling of this node{had}.",
        "被拒绝：在“{parent}”之后目标模型选择了它的兄弟“{draw}”（{dp}）{had}。",
    ),
    "why.miss": (
        "Rejected: after “{parent}” the target drew “{draw}” ({dp}), which no child in the tree was{had}.",
        "被拒绝：在“{parent}”之后目标模型选择了“{draw}”（{dp}），树中没有这个子节点{had}。",
    ),
    "why.vocabulary": (
        "Rejected: after “{parent}” the target drew “{draw}” ({dp}), which the drafter’s vocabulary does not hold, "
        "so no draft could have met it{had}.",
        "被拒绝：在“{parent}”之后目标模型选择了“{draw}”（{dp}），草稿模型的词表里没有它，任何草稿都不可能命中{had}。",
    ),
    "why.unreached": (
        "Never reached: its ancestor “{ancestor}” was rejected, so what the target drew here does not count.",
        "没有到达：祖先“{ancestor}”已被拒绝，因此目标模型在这里的选择不算数。",
    ),
    "why.past": (
        "The target agreed, yet the answer had already stopped: this token is not emitted.",
        "目标模型同意，但回答已经停止：此词元不输出。",
    ),
    "why.beam": (
        "In the beam, so the drafter expanded it; then rerank left it out: value {v}, the lowest kept is {floor}.",
        "曾在束中并被展开，随后在重排时落选：价值 {v}，保留的最低价值是 {floor}。",
    ),
    "why.outside": (
        "Scored and left out: value {v}, the lowest kept value is {floor}.",
        "打过分但未保留：价值 {v}，保留的最低价值是 {floor}。",
    ),
    "why.rule": (
        "Scored and left out by the growth rule in force, which does not go by value alone (its value {v}).",
        "打过分但被当前的生长规则排除，该规则不只看价值（其价值 {v}）。",
    ),
    "why.bonus": (
        "The target’s own token where the walk stopped ({dp}): it costs nothing extra and is the next root.",
        "路径停止处目标模型自己的词元（{dp}）：没有额外代价，并成为下一个根。",
    ),
    "draw.likeliest": ("its likeliest token", "概率最高的词元"),
    "draw.p": ("p {p}", "p {p}"),
    "draw.had": ("; “{token}” had p {p}", "；“{token}”的概率是 {p}"),
    # The mask
    "mask.title": ("Tree attention mask", "树注意力掩码"),
    "mask.axes": ("rows look, columns are seen", "行在看，列被看"),
    "mask.committed": ("all {n} committed tokens, seen by every row", "全部 {n} 个已提交的词元，每一行都看得见"),
    "mask.cell": (
        "“{row}” sees {n} in the tree and the {c} before it · position {pos} · cache slot {slot}",
        "“{row}”看见树中 {n} 个和之前 {c} 个 · 位置 {pos} · 缓存槽 {slot}",
    ),
    # The lesson
    "lesson": ("Lesson", "课程"),
    "lesson.info": ("How a draft tree works, in ten short pages", "用十页短文讲清草稿树"),
    "lesson.at": ("{i} of {n} · {title}", "{i}/{n} · {title}"),
    "lesson.back": ("Back", "上一页"),
    "lesson.next": ("Next", "下一页"),
    "lesson.done": ("Done", "完成"),
    "lesson.end": ("End the lesson", "结束课程"),
    "lesson.draft": ("A draft", "草稿"),
    "lesson.draft.text": (
        "The model that answers, the target, reads all its weights for every single token. So a small drafter guesses "
        "ahead: {forwards} quick forwards propose {made} ways to go on after “{root}”.",
        "回答问题的目标模型每写一个词元都要把全部权重读一遍。因此先让小巧的草稿模型往前猜："
        "{forwards} 次快速前向，在“{root}”之后提出 {made} 个续写候选。",
    ),
    "lesson.value": ("Value", "价值"),
    "lesson.value.text": (
        "After “{parent}” the drafter gives “{token}” the probability {c}: its confidence. Times the value {pv} of "
        "“{parent}” that is {v}, its value: how likely the whole path is. Larger type, larger value.",
        "在“{parent}”之后，草稿模型给“{token}”的概率是 {c}，即置信度；再乘以“{parent}”的价值 {pv} 得到 {v}，"
        "即它的价值：整条路径有多可能。字越大，价值越高。",
    ),
    "lesson.rerank": ("Rerank", "重排"),
    "lesson.rerank.text": (
        "Every node costs time to verify, so of {made} candidates only the {kept} most valuable stay. "
        "The others never reach the target.",
        "每个节点的验证都要花时间，所以 {made} 个候选中只保留价值最高的 {kept} 个，其余的不会送到目标模型。",
    ),
    "lesson.mask": ("One row, one mask", "一行与一张掩码"),
    "lesson.mask.text": (
        "The {n} nodes stand in one row, so that one forward can read them all. The mask keeps the branches apart: "
        "“{token}” sees its {a} ancestors, itself and the text before, and nothing else.",
        "{n} 个节点排成一行，一次前向就能全部读完。掩码把各分支隔开："
        "“{token}”只看见它的 {a} 个祖先、它自己和之前的文本。",
    ),
    "lesson.verify": ("Verify", "验证"),
    "lesson.verify.text": (
        "One forward of the target over {n} nodes. Behind each node, after ▸, stands what the target itself would "
        "write next: at temperature 0 its likeliest token, above it a draw and its probability. After “{root}” that "
        "is “{draw}”.",
        "目标模型对 {n} 个节点做一次前向。每个节点后面的 ▸ 之后是目标模型自己接下来会写的词元："
        "温度为 0 时是概率最高的词元，高于 0 时是抽中的词元及其概率。在“{root}”之后是“{draw}”。",
    ),
    "lesson.accept": ("Accept", "接受"),
    "lesson.accept.text": (
        "Start at the root and go to the child that is the target’s draw, as long as there is one: {a} drafted tokens "
        "are accepted. Where the walk ends, the target’s own “{bonus}” is written too.",
        "从根出发，走向与目标模型的选择相同的子节点，能走多远走多远：{a} 个草稿词元被接受。"
        "走到尽头，再写下目标模型自己的“{bonus}”。",
    ),
    "lesson.rollback": ("Roll back", "回退"),
    "lesson.rollback.text": (
        "The forward left {n} rows in the target’s cache. The {kept} on the path close ranks, the other {gone} leave. "
        "One forward, {e} tokens; “{bonus}” is the next root.",
        "这次前向在目标模型的缓存里留下 {n} 行。路径上的 {kept} 行靠拢留下，其余 {gone} 行离开。"
        "一次前向得到 {e} 个词元；“{bonus}”成为下一个根。",
    ),
    "lesson.hit": ("When drafts hit", "猜中的时候"),
    "lesson.hit.text": (
        "Where the text is easy to foresee, whole branches come true: {a} drafted tokens in this one step, and {tau} "
        "tokens for each forward of the target over the whole answer (τ).",
        "文本容易预料时，整条分支都会成真：这一步接受了 {a} 个草稿词元；整个回答平均每次前向得到 {tau} 个词元（τ）。",
    ),
    "lesson.miss": ("When drafts miss", "猜错的时候"),
    "lesson.miss.text": (
        "Here the target drew “{draw}”, and no child of the root is that. All {n} drafted tokens are thrown away and "
        "one token is written, as without drafting, at the price of a tree.",
        "这里目标模型选择了“{draw}”，根的子节点中没有它。{n} 个草稿词元全部作废，"
        "只写下一个词元，和不打草稿一样，却付出了一棵树的代价。",
    ),
    "lesson.slower": ("Why it can be slower", "为什么也会更慢"),
    "lesson.slower.text": (
        "A step of this run takes {ms} ms, {draft} of them drafting and {verify} verifying, and gives {tau} tokens. "
        "It pays where a plain forward takes longer than {even} ms. Large targets read a tree in hardly more time than "
        "one token; a small one on a CPU may not.",
        "这次运行的一步用 {ms} 毫秒，其中起草 {draft}、验证 {verify}，得到 {tau} 个词元。"
        "一次普通前向超过 {even} 毫秒时才划算。大模型读一棵树几乎和读一个词元一样快；CPU 上的小模型则未必。",
    ),
    # The player
    "play": ("Play", "播放"),
    "pause": ("Pause", "暂停"),
    "prev.step": ("Previous step", "上一步"),
    "next.step": ("Next step", "下一步"),
    "prev.phase": ("Back one phase", "后退一个阶段"),
    "next.phase": ("Forward one phase", "前进一个阶段"),
    "speed": ("Speed", "速度"),
    "speed.real": ("as it ran", "真实速度"),
    "phases": ("Phases of the step", "这一步的阶段"),
    "answer": ("The conversation", "对话"),
    "canvas.label": (
        "Draft tree and attention mask; arrow keys walk through the nodes, Enter explains one",
        "草稿树与注意力掩码；方向键在节点间移动，回车键解释节点",
    ),
    "ruler.root": ("root", "根"),
    "ruler.depth": ("depth {d}", "第 {d} 层"),
    "legend.sample": ("abc", "词元"),
    "legend.rejected": ("rejected", "被拒绝"),
    "legend.never": ("never reached, or left out", "没有到达或落选"),
    "live": ("Live", "实时"),
    "live.info": ("Follow the newest step", "跟随最新一步"),
    "step.of": ("step {k} of {n}", "第 {k} / {n} 步"),
    "scrub": ("Step of the answer", "回答的步"),
    "fit": ("Fit", "适应"),
    "zoom.in": ("Zoom in", "放大"),
    "zoom.out": ("Zoom out", "缩小"),
    "full": ("Projector mode", "投影模式"),
    "dropped": ("Dropped candidates", "落选候选"),
    "dropped.hide": ("dropped: hidden", "落选：隐藏"),
    "dropped.count": ("dropped: counted", "落选：计数"),
    "dropped.show": ("dropped: shown", "落选：显示"),
    "help": ("Keys", "按键"),
    "close": ("Close", "关闭"),
    "fold": ("Fold the subtree", "折叠子树"),
    "unfold": ("Unfold the subtree", "展开子树"),
    "more": ("+{n}", "+{n}"),
    "gap": ("Some steps did not arrive", "有些步没有收到"),
    "you": ("You", "你"),
    "untitled": ("A recorded run", "一次录制的运行"),
    "keep": ("Keep", "保存"),
    "keep.trace": ("Trace, every event (.jsonl)", "记录，全部事件 (.jsonl)"),
    "keep.replay": ("Replay as one page (.html)", "回放为单个页面 (.html)"),
    "keep.csv": ("Numbers of the run (.csv)", "这次运行的数字 (.csv)"),
    "keep.graphml": ("This tree (.graphml)", "这棵树 (.graphml)"),
    "keep.svg": ("This picture (.svg)", "这幅图 (.svg)"),
    "keep.png": ("This picture (.png)", "这幅图 (.png)"),
    "keep.open": ("Open a trace…", "打开记录……"),
    "keep.bad": ("{name}: {text}", "{name}：{text}"),
    "link": ("Copy link", "复制链接"),
    "link.info": ("prompt, knobs, seed and view", "提示、参数、种子与视图"),
    "tab.charts": ("Charts", "图表"),
    "tab.lab": ("Lab: sweep a knob", "实验：扫描一个参数"),
    "tab.models": ("Models", "模型"),
    "tab.tree": ("EAGLE-1’s tree", "EAGLE-1 的树"),
    "lab.prompts": ("Prompts, one a line", "提示，每行一个"),
    "lab.knob": ("Knob", "参数"),
    "lab.values": ("Values", "取值"),
    "lab.temperatures": ("Temperatures", "温度"),
    "lab.tokens": ("Tokens of each answer", "每个回答的词元数"),
    "lab.run": ("Run the sweep", "开始扫描"),
    "lab.cancel": ("Cancel", "取消"),
    "lab.progress": ("{done} of {all}: {knob} = {value}, temperature {t}", "{done}/{all}：{knob} = {value}，温度 {t}"),
    "lab.about": ("{n} prompts, {m} tokens each at most", "{n} 个提示，每个最多 {m} 个词元"),
    "auto": ("auto", "自动"),
    "charts.svg": ("Keep as one picture (.svg)", "保存为一幅图 (.svg)"),
    "charts.png": ("Keep as one picture (.png)", "保存为一幅图 (.png)"),
    "lab.best": (
        "At temperature {t}, {knob} = {value} was fastest: {tps} tokens/s with τ {tau}. "
        "The largest τ, {most}, came with {knob} = {at}, at {ms} ms a step against {best_ms} ms.",
        "温度 {t} 时，{knob} = {value} 最快：{tps} 词元/秒，τ 为 {tau}。"
        "τ 最大（{most}）的是 {knob} = {at}，但每步用时 {ms} 毫秒，而最快者为 {best_ms} 毫秒。",
    ),
    "lab.same": (
        "At temperature {t}, {knob} = {value} was fastest: {tps} tokens/s, and has the largest τ as well, {tau}.",
        "温度 {t} 时，{knob} = {value} 最快：{tps} 词元/秒，τ 也最大：{tau}。",
    ),
    "lab.bad": ("not a list of numbers, or nothing to ask: {text}", "不是数字列表，或没有提示：{text}"),
    "chart.sweep": ("τ and measured tokens/s", "τ 与实测词元/秒"),
    "axis.tau": ("τ (tokens/forward)", "τ（词元/前向）"),
    "axis.speed": ("tokens/s, measured", "词元/秒，实测"),
    "models.target": ("Target: preset, hub id or folder", "目标模型：预设、Hub 模型 ID 或文件夹"),
    "models.drafter": (
        "Drafter: hub id or folder (empty: the preset’s own)",
        "草稿头：Hub 模型 ID 或文件夹（留空用预设）",
    ),
    "models.look": ("Look before loading", "加载前查看"),
    "models.load": ("Load", "加载"),
    "models.off": (
        "This is a public page; other models can be loaded where you run it yourself.",
        "这是公共页面；自行运行时可以加载其他模型。",
    ),
    "models.loading": ("Loading {name}…", "正在加载 {name}……"),
    "models.memory": (
        "{name}: {parameters} million parameters, {weights} MB of weights as {dtype}, "
        "{kv} kB of cache a token, context {context}",
        "{name}：{parameters} 百万参数，{dtype} 权重 {weights} MB，每个词元缓存 {kv} kB，上下文 {context}",
    ),
    "models.ready": ("Ready: {name} with {methods}", "就绪：{name}，可用方法 {methods}"),
    "tree.paths": ("The tree as rank paths", "以名次路径表示的树"),
    "tree.hint": (
        "Click a node to give it its next child; Shift-click or Delete takes it away. Empty: the reference’s 25 nodes.",
        "点击节点添加下一个子节点；Shift 点击或 Delete 键移除。留空则用参考实现的 25 个节点。",
    ),
    # Charts
    "chart.empty": ("no steps yet", "还没有步"),
    "chart.length": ("Tokens emitted per step", "每步输出的词元数"),
    "chart.histogram": ("How often a step accepted n drafted tokens", "每步接受 n 个草稿词元的次数"),
    "chart.acceptance": ("Acceptance by depth", "各深度的接受率"),
    "chart.calibration": ("Is the drafter’s confidence right?", "草稿模型的置信度准吗？"),
    "chart.time": ("Time of each step", "每步的时间"),
    "chart.race": ("Tokens over time", "词元随时间"),
    "chart.size": ("Nodes of the tree by depth, mean of a step", "各深度的节点数（每步平均）"),
    "axis.step": ("step", "步"),
    "axis.tokens": ("tokens", "词元"),
    "axis.steps": ("steps", "步数"),
    "axis.depth": ("depth", "深度"),
    "axis.share": ("share", "比例"),
    "axis.ms": ("milliseconds", "毫秒"),
    "axis.seconds": ("seconds from the first token", "从首个词元起的秒数"),
    "axis.confidence": ("confidence", "置信度"),
    "axis.accepted": ("accepted, of those whose parent was", "（父节点被接受者中的）接受率"),
    "axis.nodes": ("nodes", "节点"),
    "series.accepted": ("drafted and accepted", "起草并被接受"),
    "series.bonus": ("the target’s own", "目标模型自己的"),
    "series.tau": ("mean τ", "平均 τ"),
    "series.unconditional": ("of all steps", "占全部步"),
    "series.conditional": ("given the depth before", "在前一深度已接受的条件下"),
    "series.ideal": ("a calibrated drafter", "完全校准"),
    "series.drafted": ("in the tree", "在树中"),
    # Screen reader
    "summary": (
        "Step {k}: {n} nodes, depth 1 to {d}; {path}; then the target’s own “{bonus}”.",
        "第 {k} 步：{n} 个节点，深度 1 到 {d}；{path}；然后是目标模型自己的“{bonus}”。",
    ),
    "summary.root": (
        "Step {k}: no draft; the target’s own “{bonus}”.",
        "第 {k} 步：没有草稿；目标模型自己的“{bonus}”。",
    ),
    "summary.path": ("path of {n} accepted: {tokens}", "接受了 {n} 个：{tokens}"),
    "summary.nopath": ("no drafted token accepted", "没有接受任何草稿词元"),
    # Keys
    "keys.space": ("play or pause", "播放或暂停"),
    "keys.arrows": ("one step back or forward", "后退或前进一步"),
    "keys.phase": ("one phase back or forward", "后退或前进一个阶段"),
    "keys.ends": ("first or last step", "第一步或最后一步"),
    "keys.nodes": ("walk through the nodes of the tree", "在树的节点间移动"),
    "keys.enter": ("why is this node so?", "这个节点为什么是这样？"),
    "keys.fold": ("fold or unfold below the node", "折叠或展开节点以下"),
    "keys.lesson": ("the lesson; its next and previous page", "课程；下一页与上一页"),
    "keys.live": ("follow the newest step", "跟随最新一步"),
    "keys.fit": ("fit the tree; a long one: all of it, or its readable part", "适应窗口；长的树：全部，或可读的部分"),
    "keys.zoom": ("zoom", "缩放"),
    "keys.whatif": ("what if this step had another budget?", "假如这一步用别的预算？"),
    "keys.full": ("projector mode", "投影模式"),
    "keys.ghosts": ("dropped candidates: hidden, counted, shown", "落选候选：隐藏、计数、显示"),
    "keys.escape": ("close, or stop the answer", "关闭，或停止回答"),
    "keys.help": ("this list", "此列表"),
}

for _name, _method in METHODS.items():
    _label, _explain = _METHODS_ZH.get(_name, (_method.label, _method.explain))
    _TABLE |= {f"method.{_name}": (_method.label, _label), f"method.{_name}.explain": (_method.explain, _explain)}

WORDS: dict[str, dict[str, str]] = {
    language: {key: row[column] for key, row in _TABLE.items()} for column, language in enumerate(LANGUAGES)
}
"""Language → key → template."""

_SLOT = re.compile(r"\{(\w+)\}")


def say(language: str, key: str, /, **slots: object) -> str:
    """The sentence `key` in `language`, filled. Raises KeyError for an unknown key or an unfilled slot."""
    return _SLOT.sub(lambda m: str(slots[m[1]]), WORDS[language][key])


def number(x: float) -> str:
    """A probability or value as the page writes it: three digits that matter, never a false zero or one."""
    if x == int(x):
        return str(int(x))
    if x < 0.0005:
        return "<0.001"
    if 0.9995 <= x < 1:
        return ">0.999"
    return f"{x:.3f}"


def auto(value: float, language: str) -> str:
    """The value of a knob as people read it: -1 chooses by measuring."""
    return say(language, "auto") if value == -1 else f"{value:g}"


def target_name(pair: Mapping[str, Any]) -> str:
    """What a run's target is called, as far as its `Start` says so."""
    target = pair.get("target")
    name = target.get("name") if isinstance(target, Mapping) else target
    return name if isinstance(name, str) else ""


def knows_the_dice(start: Start) -> bool:
    """Whether a run's drafter knew the noise of the target's draws."""
    method, temperature = METHODS.get(start.method), start.sampling.get("temperature")
    drawn = isinstance(temperature, int | float) and temperature > 0
    return drawn and start.settings.get("coupled") is True and method is not None and "coupled" in method.settings


def chance(language: str, p: float) -> str:
    """How a draw of that probability is called: where nothing else can be drawn, as at temperature 0, a number would
    say that the target was certain, which it need not be."""
    return say(language, "draw.likeliest") if p == 1 else say(language, "draw.p", p=number(p))


def about(start: Start, language: str, verdict: Mapping[str, Any] | None = None) -> str:
    """What a picture says of itself: method, settings, pair, hardware, verdict."""
    tree = start.settings
    slots = {k: visible(v) if isinstance(v, str) else v for k, v in (verdict or {}).items()}
    uses = METHODS[start.method].settings if start.method in METHODS else tuple(tree)
    knobs = [(key.replace("_k", "-k"), key) for key in ("total_token", "depth", "top_k") if key in uses]
    parts = [
        say(language, f"method.{start.method}") if f"method.{start.method}" in WORDS[language] else start.method,
        " · ".join(f"{label} {tree[key]}" for label, key in knobs if isinstance(tree.get(key), int)),
        " · ".join(f"{label} {start.sampling[key]}" for label, key in (("T", "temperature"), ("seed", "seed"))
                   if isinstance(start.sampling.get(key), int | float)),
        say(language, "coupled.known") if knows_the_dice(start) else "",
        target_name(start.pair),
        f"{start.device} · {start.dtype} · {start.machine}",
        say(language, f"verdict.{verdict['key']}", **slots) if verdict else say(language, "verdict.none"),
    ]  # fmt: skip
    return "  ·  ".join(part for part in parts if part)


def visible(text: str) -> str:
    """A token as a label: blanks and control characters become marks, everything else stays what it is.

    >>> visible(" the"), visible("\\n"), visible("\\u202e<b>")
    ('·the', '↵', '⟨202E⟩<b>')
    """
    if not text:
        return "∅"
    return "".join(_MARKS.get(c) or (f"⟨{ord(c):04X}⟩" if _hidden(c) else c) for c in text)


_MARKS = {" ": "·", "\n": "↵", "\r": "␍", "\t": "⇥"}
_JOINERS = "\u200c\u200d"  # they shape emoji and Persian words, and reorder nothing


def _hidden(c: str) -> bool:
    return unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp", "Zs", "Cs", "Co") and c not in _JOINERS
