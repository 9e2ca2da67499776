"""The names of things: pictograms with their characters, plurals, synonyms, and words to print."""

from __future__ import annotations

from dataclasses import dataclass

NUMBERS = ("no", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")

# character, name, plural ("" for the name + s), synonyms
_PICTOGRAMS = """
🐱 cat||kitten,kitty
🐶 dog||puppy
🐭 mouse|mice|
🐰 rabbit||bunny,hare
🦊 fox|foxes|
🐻 bear||
🐼 panda||panda bear
🐨 koala||
🐯 tiger||
🦁 lion||
🐮 cow||
🐷 pig||
🐸 frog||
🐵 monkey||
🐔 chicken||hen
🐧 penguin||
🦆 duck||
🦅 eagle||
🦉 owl||
🐴 horse||
🦄 unicorn||
🐝 bee||
🦋 butterfly|butterflies|
🐌 snail||
🐞 ladybug||ladybird
🕷 spider||
🐢 turtle||tortoise
🐍 snake||
🦖 dinosaur||
🐙 octopus|octopuses|
🦀 crab||
🐠 fish|fish|
🐬 dolphin||
🐳 whale||
🦈 shark||
🐊 crocodile||alligator
🦓 zebra||
🐘 elephant||
🐫 camel||
🦒 giraffe||
🐑 sheep|sheep|
🦌 deer|deer|
🦩 flamingo|flamingos|
🦜 parrot||
🦔 hedgehog||
🌵 cactus|cactuses|
🌲 tree||fir
🌴 palm tree||
🍀 clover||
🍁 leaf|leaves|maple leaf
🍄 mushroom||
🌷 tulip||
🌹 rose||
🌻 sunflower||
🌞 sun||
🌙 moon||
🌈 rainbow||
🔥 fire||flame
❄ snowflake||
☁ cloud||
⚡ lightning bolt||
💧 drop||droplet
🌍 globe||earth
🍎 apple||
🍋 lemon||
🍌 banana||
🍉 watermelon||
🍇 bunch of grapes|bunches of grapes|
🍓 strawberry|strawberries|
🍒 pair of cherries|pairs of cherries|
🍍 pineapple||
🍅 tomato|tomatoes|
🍆 eggplant||aubergine
🥕 carrot||
🌽 corn cob||
🌶 chili pepper||
🥑 avocado|avocados|
🥦 broccoli|broccoli|
🍞 loaf of bread|loaves of bread|
🧀 cheese|cheeses|
🍔 hamburger||burger
🍟 portion of fries|portions of fries|
🍕 pizza||
🌭 hot dog||
🥚 egg||
🍩 doughnut||donut
🍪 cookie||biscuit
🎂 cake||birthday cake
🍦 ice cream||
🍭 lollipop||
☕ cup of coffee|cups of coffee|
🍺 beer||
🍷 glass of wine|glasses of wine|
⚽ soccer ball||football
🏀 basketball||
🎾 tennis ball||
🎳 bowling set||
🎲 die|dice|
🎯 target||
🎮 game controller||gamepad
🎸 guitar||
🎺 trumpet||
🎻 violin||
🥁 drum||
🎹 piano|pianos|
🚗 car||automobile
🚕 taxi||cab
🚌 bus|buses|
🚑 ambulance||
🚒 fire truck||fire engine
🚜 tractor||
🚲 bicycle||bike
🏍 motorcycle||motorbike
🚂 train||locomotive
✈ airplane||plane,aeroplane
🚁 helicopter||
🚀 rocket||
⛵ sailboat||boat
🚢 ship||
⚓ anchor||
🚦 traffic light||
🏠 house||home
🏰 castle||
⛪ church|churches|
⛺ tent||
🗼 tower||
🌋 volcano|volcanoes|
⌚ watch|watches|wristwatch
📱 phone||smartphone
💻 laptop||notebook computer
📷 camera||
📺 television||tv
⏰ alarm clock||clock
💡 light bulb||
🔋 battery|batteries|
🔑 key||
🔒 lock||padlock
🔨 hammer||
🔧 wrench|wrenches|spanner
🧲 magnet||
🔬 microscope||
🔭 telescope||
💊 pill||
🚪 door||
🛏 bed||
🚽 toilet||
🪑 chair||
🎁 gift||present
🎈 balloon||
🏆 trophy|trophies|cup
🥇 medal||
👑 crown||
💍 diamond ring||
👓 pair of glasses|pairs of glasses|
✂ pair of scissors|pairs of scissors|
👕 shirt||t-shirt
👗 dress|dresses|
👖 pair of trousers|pairs of trousers|
🧦 pair of socks|pairs of socks|
👟 shoe||sneaker
👢 boot||
🎩 hat||top hat
🎒 backpack||rucksack
☂ umbrella||
📕 book||
✏ pencil||
📎 paper clip||
✉ envelope||letter
📦 box|boxes|parcel
🔔 bell||
🕯 candle||
⏳ hourglass|hourglasses|
🧭 compass|compasses|
🧸 teddy bear||
🤖 robot||
👻 ghost||
👽 alien||
💀 skull||
🎃 pumpkin||
⛄ snowman|snowmen|
😀 smiley||smiley face
👁 eye||
👂 ear||
👃 nose||
✋ hand||
👣 pair of footprints|pairs of footprints|
🦷 tooth|teeth|
🦴 bone||
"""


@dataclass(frozen=True)
class Noun:
    """A kind of thing: its name, plural, synonyms, and, for a pictogram, its character (empty for a shape)."""

    name: str
    plural: str
    synonyms: tuple[str, ...]
    character: str = ""


def _pictograms() -> dict[str, Noun]:
    nouns = {}
    for line in _PICTOGRAMS.strip().splitlines():
        character, rest = line.split(" ", 1)
        name, plural, synonyms = rest.split("|")
        nouns[name] = Noun(name, plural or name + "s", tuple(s for s in synonyms.split(",") if s), character)
    return nouns


PICTOGRAMS: dict[str, Noun] = _pictograms()

SHAPE_NOUNS: dict[str, Noun] = {
    name: Noun(name, plural, synonyms)
    for name, plural, synonyms in (
        ("circle", "circles", ("disc", "round shape")),
        ("square", "squares", ()),
        ("triangle", "triangles", ()),
        ("rectangle", "rectangles", ()),
        ("oval", "ovals", ("ellipse",)),
        ("star", "stars", ()),
        ("heart", "hearts", ()),
        ("diamond", "diamonds", ("rhombus",)),
        ("pentagon", "pentagons", ()),
        ("hexagon", "hexagons", ()),
        ("cross", "crosses", ("plus sign",)),
        ("ring", "rings", ()),
        ("arrow", "arrows", ()),
        ("semicircle", "semicircles", ("half circle",)),
    )
}

NOUNS: dict[str, Noun] = SHAPE_NOUNS | PICTOGRAMS


def article(phrase: str) -> str:
    """``phrase`` with "a" or "an" before it."""
    return ("an " if phrase[0] in "aeiou" and not phrase.startswith("uni") else "a ") + phrase


def number(count: int) -> str:
    """A count in words, in digits above ten."""
    return NUMBERS[count] if count < len(NUMBERS) else str(count)


_PRINTED_WORDS = """
hello world open closed stop sale exit enter push pull free new hot cold coffee tea milk bread water fire book
music dance happy smile love peace dream star moon sun rain snow wind storm river lake ocean beach island forest
garden flower apple banana cherry orange lemon grape melon pizza burger pasta salad soup rice sugar honey
monday tuesday friday sunday january march april june july august winter spring summer autumn north south east west
red blue green yellow black white pink brown silver gold one two three four five six seven eight nine ten zero
yes no go up down left right start end begin finish play pause next back home menu help info news sport game
team score win lose best good bad big small fast slow high low old young day night light dark early late
cat dog bird fish horse lion tiger bear wolf fox mouse house door window table chair room floor roof wall street
road bridge park city town village hotel bank shop store market school office taxi bus train plane ship boat car
bike walk run jump swim ride drive fly ticket price cash card money dollar euro cent gift party birthday welcome
thanks please sorry danger warning caution quiet private public staff only wet paint keep out off grass thank you
lunch dinner breakfast today special offer discount fresh local organic natural pure power energy speed force
green paper pencil letter number word line page photo picture camera video radio phone email web code data file
test demo model vision image text label sign logo brand name title king queen prince castle crown magic secret
"""

PRINTED_WORDS: tuple[str, ...] = tuple(_PRINTED_WORDS.split())
