"""Pages of one file: the data of a plan as tables, and the templates (`templates/report/`) that show them.

* `packed_rows`: rows as columns, with every text stored once
* `facts`: values that a page needs more than once
* `eviction_estimates`: the saving and cost of not keeping a value between two uses
* `larger_budget`: the gain of a larger budget
* `program_data`: operations, launches and the bytes of the arena of one program
* `plan_data`: all data of the page of a plan
* `answer`: a question, its answer and lines below it
* `time_words`: the answer on what takes the time
* `answers`: the answers of the page of a plan
* `render`: data and templates to a page
* `head`: title and figures
* `plan_page`: the page of a plan
* `diff_words`: the answers of the page of two plans
* `diff_page`: the page of two plans
* `recorded`: results of other commands that a page shows beside the plan
* `notebook`: a few figures and a picture, for notebooks
"""
